"""`weft recipes`: the recipes with one line each."""

import argparse

from weft.recipes import RECIPES


def run(arguments: argparse.Namespace) -> int:
    """Prints the recipes, the default one first."""
    del arguments
    width = max(len(recipe.name) for recipe in RECIPES)
    for recipe in RECIPES:
        default = " (the default)" if recipe is RECIPES[0] else ""
        print(f"{recipe.name:{width}}  {recipe.summary}{default}")
    return 0
