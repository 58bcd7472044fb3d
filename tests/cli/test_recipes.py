from weft.cli.arguments import parse_arguments
from weft.cli.recipes import run
from weft.recipes import RECIPES


def test_each_recipe_has_a_line_and_the_first_is_the_default(capsys):
    assert run(parse_arguments(["recipes"])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [recipe.name for recipe in RECIPES]
    assert [line.endswith("(the default)") for line in lines] == [True, *[False] * (len(lines) - 1)]
