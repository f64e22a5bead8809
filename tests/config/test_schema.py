import pytest
from pydantic import BaseModel

from config import schema
from config.errors import ParamsError
from config.load import load
from config.methods.registry import RECORDS
from config.schema import Params
from config.sections.base import Section, Sparse
from config.sections.data import Data
from config.sections.model import Model
from config.sections.retraining import Retrain
from config.sections.where import PlaceOverride, Where
from tests.conftest import ROOT


def sections() -> list[type[BaseModel]]:
    named = [
        item
        for name, item in vars(schema).items()
        if isinstance(item, type) and issubclass(item, Section) and not name.startswith("_")
    ]
    return [*named, *(method.settings for method in RECORDS.values())]


def test_no_parameter_has_a_default() -> None:
    optional = {
        (section, field.default)
        for section in [*sections(), PlaceOverride]
        for field in section.model_fields.values()
        if not field.is_required()
    }
    assert optional == {
        (Where, None),
        (PlaceOverride, None),
        (Params, None),
        (Model, None),
        (Data, None),
        (Retrain, None),
    }, "absent, and taken from no value here"


def test_every_parameter_has_a_description() -> None:
    missing = [
        f"{section.__name__}.{name}"
        for section in sections()
        if section not in (Section, Sparse, Params)
        for name, field in section.model_fields.items()
        if not field.description and name != "kind"
    ]
    assert missing == []


def test_sections_are_frozen_and_refuse_unknown_keys_and_conversions() -> None:
    assert all(
        section.model_config.get("frozen") and section.model_config.get("extra") == "forbid" for section in sections()
    )
    assert all(section.model_config.get("strict") for section in sections())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("prices.usd_per_device_hour=0", "an hour of a device costs something"),
        (
            "data.source={kind: file, path: https://me:hunter2@data.example/x.jsonl, format: pairs, columns: {}}",
            r"data\.source\.path has a password before data\.example",
        ),
        (
            "data.source={kind: file, path: "
            "'zip://x.jsonl::https://me:hunter2@data.example/x.zip', format: pairs, columns: {}}",
            r"data\.source\.path has a password before data\.example",
        ),
        (
            "data.source={kind: file, path: "
            "'https://data.example/x.jsonl?X-Amz-Signature=hunter2', format: pairs, columns: {}}",
            r"data\.source\.path has a value of 'X-Amz-Signature' in its query, .* RLHF_DATA_",
        ),
        (
            "data.source={kind: file, path: 'https://hunter2@data.example/x.jsonl', format: pairs, columns: {}}",
            r"data\.source\.path has a login before data\.example",
        ),
        (
            "data.source={kind: file, path: "
            "'https://data.example/x.jsonl?t=hunter2hunter2hunter2', format: pairs, columns: {}}",
            r"data\.source\.path has a value of 't' in its query",
        ),
        (
            "data.vote_source={kind: file, path: 'file:///x.jsonl', format: votes, columns: {}}",
            r"data\.vote_source\.path=file:///x\.jsonl has the scheme file",
        ),
        (
            "data.source={kind: file, path: 'simplecache::s3://b/x.jsonl', format: pairs, columns: {}}",
            r"data\.source\.path=.* chains one address to another",
        ),
        (
            "tracking.uri=postgresql://me:hunter2@db/mlflow",
            r"tracking\.uri has a password before db, .* MLFLOW_TRACKING_PASSWORD",
        ),
        (
            "tracking.uri=postgresql://db/mlflow?user=me&password=hunter2",
            r"tracking\.uri has a value of 'password' in its query",
        ),
        ("tracking.uri=http://me:hunter2/ss@host:5000", r"tracking\.uri has a password before host"),
        ("tracking.uri=https://hunter2@host:5000", r"tracking\.uri has a login before host"),
        (
            "retrain.safety_source={kind: file, path: 'https://data.example/x.jsonl?sig=hunter2', "
            "format: prompts, columns: {}}",
            r"retrain\.safety_source\.path has a value of 'sig' in its query, .* RLHF_DATA_",
        ),
        (
            "retrain.safety_source={kind: file, path: 'file:///x.jsonl', format: prompts, columns: {}}",
            r"retrain\.safety_source\.path=file:///x\.jsonl has the scheme file",
        ),
        (
            "prices.source='https://me:hunter2@prices.example/list'",
            r"prices\.source has a password before prices\.example",
        ),
        ("prices.usd_per_device_hour=-0.5", r"prices\.usd_per_device_hour=-0\.5"),
        ("prices.usd_per_device_hour=1e6", r"less than or equal to 1000"),
        ("prices.usd_per_device_hour=.nan", r"prices\.usd_per_device_hour=nan"),
        ("prices.usd_per_kwh=11", r"prices\.usd_per_kwh=11"),
        ("prices.watts=0", r"prices\.watts=0"),
        ("prices.date=null", r"prices\.date=None"),
        ("prices.date=2026-02-30", "is not a date"),
        ("prices.source=", r"prices\.source is empty"),
        ("budget.max_usd=0", r"budget\.max_usd=0"),
        ("budget.max_usd=.inf", r"budget\.max_usd=inf"),
        ("budget.max_hours=-1", r"budget\.max_hours=-1"),
        ("budget.max_usd_by_stage.pppo=1", r"limits pppo, which is not a stage; did you mean ppo\?"),
        ("budget.max_hours_by_stage.ppo=0", r"budget\.max_hours_by_stage\.ppo=0"),
        ("budget.approval_usd=-1", r"budget\.approval_usd=-1"),
    ],
)
def test_a_price_or_budget_that_cannot_be_meant_is_one_line(change: str, words: str) -> None:
    with pytest.raises(ParamsError, match=words) as refused:
        load(ROOT / "recipes" / "demo.yaml", [change])
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_day_needs_no_quotes() -> None:
    assert load(ROOT / "recipes" / "demo.yaml", ["prices.date=2026-12-01"]).prices.date == "2026-12-01"


@pytest.mark.parametrize("uri", ["http://host:5000/@me", "postgresql://me@db:5432/mlflow", "sqlite:///mlflow.db"])
def test_a_tracking_address_without_a_password_is_taken(uri: str) -> None:
    assert load(ROOT / "recipes" / "demo.yaml", [f"tracking.uri={uri}"]).tracking.uri == uri


def test_one_stage_may_have_a_limit_of_its_own() -> None:
    budget = load(
        ROOT / "recipes" / "demo.yaml", ["budget.max_usd_by_stage.ppo=2", "budget.max_hours_by_stage.sft=0.5"]
    ).budget
    assert (budget.max_usd_by_stage, budget.max_hours_by_stage) == ({"ppo": 2.0}, {"sft": 0.5})


LORA = "{rank: 4, alpha: 8.0, modules: [q], dropout: 0.0}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["reward.layers=1", f"reward.lora={LORA}"],
            r"reward\.layers=1 makes a model of its own.* Set either to null",
        ),
        (
            ["ppo.layout=shared_base"],
            r"ppo\.layout=shared_base .* ppo\.lora is null\. Set ppo\.lora, or layout: separate",
        ),
        (
            ["ppo.layout=shared_base", f"ppo.lora={LORA}"],
            r"reward\.lora is null.* Set reward\.lora and reward\.init: sft",
        ),
        (
            ["ppo.layout=shared_base", f"ppo.lora={LORA}", "reward.init=base", f"reward.lora={LORA}"],
            r"reward\.lora adapts a pretrained model",
        ),
        ([f"ppo.lora={LORA.replace('0.0', '0.1')}"], r"ppo\.lora\.dropout=0\.1: .* Set ppo\.lora\.dropout: 0\.0"),
        ([f"sft.lora={LORA}"], r"sft\.lora adapts a pretrained model.* Set sft\.lora: null, or model\.path"),
        (
            ["model.quantisation=nf4"],
            r"model\.quantisation=nf4 with ppo\.lora null: .* Set ppo\.lora, or "
            r"model\.quantisation: null",
        ),
        (["model.quantisation=int3"], r"model\.quantisation='int3'"),
        ([f"ppo.lora={LORA.replace('[q]', '[]')}"], r"ppo\.lora\.modules=\[\]"),
        ([f"ppo.lora={LORA.replace('rank: 4', 'rank: 0')}"], r"ppo\.lora\.rank=0"),
        (["ppo.lora.rnak=4"], r"ppo\.lora\.rnak is not a parameter .* did you mean rank\?"),
        (["ppo.optimizer=adamw4bit"], r"ppo\.optimizer='adamw4bit'"),
    ],
)
def test_adapters_that_cannot_work_are_one_line_that_names_what_to_change(changes: list[str], words: str) -> None:
    with pytest.raises(ParamsError, match=words) as refused:
        load(ROOT / "recipes" / "demo.yaml", changes)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["where.dpo.processes=3", "align.method=dpo"],
            r"dpo\.batch_size=\d+ does not split over where\.dpo\.processes=3",
        ),
        (["where.sft.sharding=zero4"], r"where\.sft\.sharding='zero4'"),
        (
            [
                "where.grpo.sharding=zero3",
                "grpo.batch_size=8",
                "grpo.num_mini_batches=4",
                "where.grpo.processes=4",
                "align.method=grpo",
            ],
            r"a mini-batch of 2 episodes .* where\.grpo\.processes=4",
        ),
        (["where.default.offload=true"], r"nothing is sharded\. Set where\.default\.sharding to zero2 or zero3"),
        *(
            (
                [
                    f"where.ppo={{processes: 2, sharding: {level}}}",
                    "ppo.rollout_engine=vllm",
                    "ppo.recompute_logprobs=true",
                    "ppo.layout=separate",
                    "ppo.lora=null",
                ],
                rf"ppo\.rollout_engine=vllm needs whole weights after each update, and where\.ppo\.sharding={level}",
            )
            for level in ("zero2", "zero3")
        ),
        (["where.sft.sharding=zero1"], r"where\.sft\.sharding='zero1' .* is gone; write zero2"),
        (
            ["where.ppo.sharding=zero2", "ppo.optimizer=adamw8bit"],
            r"ppo\.optimizer=adamw8bit .* where\.ppo\.sharding=zero2 would split",
        ),
        (["where.sft.sharding=zero3", "model.dtype=fp16"], r"model\.dtype=fp16 .* Set model\.dtype: bf16"),
        (
            ["where.reward.sharding=zero2", "model.quantisation=nf4", f"ppo.lora={LORA}"],
            r"nf4 packs weights into bytes that where\.reward\.sharding=zero2",
        ),
        (
            ["where.ppo.sharding=zero3", "ppo.batch_size=8", "ppo.num_mini_batches=4", "where.ppo.processes=4"],
            r"a mini-batch of 2 episodes .* where\.ppo\.processes=4",
        ),
    ],
)
def test_what_cannot_be_divided_is_one_line_that_names_what_to_change(changes: list[str], words: str) -> None:
    with pytest.raises(ParamsError, match=words) as refused:
        load(ROOT / "recipes" / "demo.yaml", changes)
    assert "\n" not in str(refused.value)


FOLDER = ["model.path=base", "model.random=null", f"sft.lora={LORA}"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [f"ppo.lora={LORA.replace('rank: 4', 'rank: 8')}"],
            r"ppo\.lora\.rank=8 and sft\.lora\.rank=4: .* starts as a copy .* Give both the same",
        ),
        ([f"reward.lora={LORA.replace('8.0', '2.0')}"], r"reward\.lora\.alpha=2\.0 and sft\.lora\.alpha=8\.0"),
        (
            [f"ppo.lora={LORA.replace('[q]', '[q, v]')}"],
            r"ppo\.lora\.modules=\['q', 'v'\] and sft\.lora\.modules=\['q'\]",
        ),
        (
            ["align.method=dpo", f"dpo.lora={LORA.replace('rank: 4', 'rank: 8')}"],
            r"dpo\.lora\.rank=8 and sft\.lora\.rank=4",
        ),
    ],
)
def test_an_adapter_that_begins_as_a_copy_is_like_the_sft_models(changes: list[str], words: str) -> None:
    with pytest.raises(ParamsError, match=words) as refused:
        load(ROOT / "recipes" / "demo.yaml", [*FOLDER, *changes])
    assert "\n" not in str(refused.value)


def test_adapters_that_are_no_copies_may_differ() -> None:
    """In dropout and in the order of their matrices; where there is no adapter to begin from; and of a method that is
    not chosen.
    """
    two = LORA.replace("[q]", "[q, v]")
    for changes in (
        [f"sft.lora={two.replace('0.0', '0.1')}", f"ppo.lora={two.replace('q, v', 'v, q')}"],
        [f"reward.lora={two}", "reward.init=base"],
        [f"reward.lora={two}", "sft.lora=null", f"ppo.lora={LORA}"],
        [f"dpo.lora={two}"],
    ):
        assert load(ROOT / "recipes" / "demo.yaml", [*FOLDER, *changes])


def test_adapters_on_the_sft_model_are_accepted_in_every_layout() -> None:
    for layout in ("separate", "shared_trunk", "shared_base"):
        params = load(
            ROOT / "recipes" / "demo.yaml", [f"ppo.layout={layout}", f"ppo.lora={LORA}", f"reward.lora={LORA}"]
        )
        assert params.ppo.lora is not None
        assert params.ppo.lora.rank == 4


@pytest.mark.parametrize(
    "path",
    [
        "abfs://rows@account.dfs.core.windows.net/x.jsonl",
        "github://owner:repository@main/x.jsonl",
        "s3://b/x@1:2.jsonl",
        "https://data.example/x.jsonl?download=true&revision=0123456789abcdef0123456789abcdef01234567",
        "https://data.example/x.jsonl?sig=${RLHF_DATA_SIGNATURE}&x-ms-token=v1.${RLHF_DATA_A}",
    ],
)
def test_an_address_whose_at_sign_is_no_login_is_taken(path: str) -> None:
    params = load(
        ROOT / "recipes" / "demo.yaml", [f"data.source={{kind: file, path: '{path}', format: pairs, columns: {{}}}}"]
    )
    assert "source" not in params.data.local_paths()
