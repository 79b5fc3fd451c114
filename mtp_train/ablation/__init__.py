"""What each RMSNorm of a head is worth: one head per mixture, seed and target, trained alike and measured on one set of answers."""
