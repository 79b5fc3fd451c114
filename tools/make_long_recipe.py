"""Write the recipe of the long prompts for the Python that runs this.

python tools/make_long_recipe.py data/prompts/long.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtp_train.faults import telling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="where to write it; its hash and counts stand in data/manifests/project_long_*.yaml")
    parser.add_argument("--seed", type=int, default=0, help="which passages and questions (default: 0)")
    parser.add_argument("--num-train", type=int, default=48, help="documents to train on (default: 48)")
    parser.add_argument("--num-heldout", type=int, default=16, help="documents to evaluate on (default: 16)")
    parser.add_argument("--prose-share", type=float, default=0.25, help="share cut from the language reference (default: 0.25)")
    arguments = parser.parse_args()

    from mtp_train.prompt.long_recipe import build_recipe
    from mtp_train.runtime import atomic_write_json, sha256_file

    recipe = build_recipe(
        seed=arguments.seed, num_train=arguments.num_train, num_heldout=arguments.num_heldout, prose_share=arguments.prose_share
    )
    atomic_write_json(arguments.recipe, recipe)
    print(f"{arguments.recipe}: {len(recipe)} documents, sha256 {sha256_file(arguments.recipe)}")


if __name__ == "__main__":
    with telling("make_long_recipe"):
        main()
