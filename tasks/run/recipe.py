"""How params.yaml differs from the recipe it came from: printed at each start, since `--set` changes the file
permanently.
"""

from pathlib import Path

from config.differences import Difference, differences, in_a_line
from config.errors import ParamsError
from config.load import read
from config.schema import Params

MOST_NAMED = 8


def differs_from_recipe(root: Path, params: Params, recipe: Path | None) -> str | None:
    """`params.yaml: seed 1 -> 2`, with the recipe's value first; None if nothing differs or there is no recipe.

    Without `recipe` it is the one of recipes/ with the fewest differences.
    """
    wanted = params.model_dump(mode="json")
    files = [recipe] if recipe is not None else sorted((root / "recipes").glob("*.yaml"))
    candidates: list[tuple[int, str, list[Difference]]] = []
    for file in files:
        try:
            against = differences(read(file), wanted)
        except ParamsError:
            if recipe is not None:
                raise
            continue  # ignore recipes that cannot be read
        place = file.relative_to(root) if file.is_relative_to(root) else file
        candidates.append((len(against), str(place), against))
    if not candidates or min(candidates)[0] == 0:
        return None
    _, name, against = min(candidates)
    return f"params.yaml: {in_a_line(against, MOST_NAMED)} (recipe: {name})"
