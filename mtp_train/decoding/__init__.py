"""How drafts are proposed, one scheme per file."""
