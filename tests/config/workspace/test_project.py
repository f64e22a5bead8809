from pathlib import Path

from config.workspace.project import STUDIES, project_of, study_name


def test_studies_of_one_stem_in_several_folders_are_several(tmp_path: Path) -> None:
    files = [Path(name) for name in ("studies/levers.yaml", "levers.yaml", "mine/levers.yaml", "studies/levers.yml")]
    names = [study_name(file) for file in files]
    assert names[0] == study_name(Path("./studies/levers.yaml")) == "levers"
    assert len(set(names)) == len(files)
    assert all(project_of(tmp_path / STUDIES / name) == tmp_path.resolve() for name in names)
