"""`rlhf doctor --migrate`: rewrite params.yaml of an earlier version in the current schema."""

from cli.project import project_root
from config.atomic_file import keep_copy, write_atomically
from config.differences import differences
from config.errors import EXIT_DONE
from config.load import dump, read, validate
from config.migration import migrated


def migrate() -> int:
    """Rewrite params.yaml, keep the old file beside it, and print the differences. A file that
    would not be valid is left unchanged. Raises ParamsError.
    """
    path = project_root() / "params.yaml"
    old = read(path)
    new = migrated(old)
    if new == old:
        print(f"{path.name} is of this version: nothing to migrate.")
        return EXIT_DONE
    params = validate(new, f"the migrated {path.name}")
    kept = keep_copy(path)
    write_atomically(path, dump(params))
    for one in differences(old, read(path)):
        print(one)
    print(f"{path.name} was rewritten; the original, with its comments, is {kept.name}.")
    return EXIT_DONE
