"""The schema of params.yaml, and the rules between its sections.

No field has a default: a default here would change results without DVC noticing. The sections of methods that
align.method does not name may be absent. Every description is shown in the Prefect form and in `docs/params.md`; units
are part of the name or of the description.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model, model_validator

from config.compose import flat
from config.errors import ParamsError
from config.methods.registry import METHODS, OFFLINE_METHODS, RECORDS
from config.records import final_stage, stages_of
from config.sections.base import Sparse
from config.sections.data import NO_PREFERENCES, Data
from config.sections.distillation import Distill
from config.sections.judge import RewardModelJudgeSettings
from config.sections.levers import Lora
from config.sections.model import Model
from config.sections.money import Budget, Prices
from config.sections.offline import Optimisation, Reward, RewardFunction, RewardSection, Sft
from config.sections.online import ActorCritic, Online, SamplingLoop
from config.sections.retraining import Retrain
from config.sections.run import Align, Evaluate, Tracking
from config.sections.where import SHARED_STAGES, SINGLE_STAGES, WEIGHTS_DIVIDED, Where
from config.urls import require_no_secret, unreadable

UNCHOSEN = "May be absent where align.method names another."


class _BeforeMethods(Sparse):
    """The sections before those of the methods; documents and forms show fields in this order."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        description="Seeds data generation, initial weights, data order and sampling."
    )
    model: Model
    data: Data
    sft: Sft
    reward: RewardSection
    align: Align


if TYPE_CHECKING:
    _WithMethods = _BeforeMethods
else:
    _WithMethods = create_model(
        "_WithMethods",
        __base__=_BeforeMethods,
        **{
            name: (method.settings | None, Field(None, title=method.settings.__name__, description=UNCHOSEN))
            for name, method in RECORDS.items()
        },
    )


class Params(_WithMethods):
    """All of params.yaml: the sections above, one for each method by its name, and these."""

    distill: Distill | None = Field(title="Distill", description="A student of the aligned model; null makes none.")
    evaluate: Evaluate
    where: Where
    prices: Prices
    budget: Budget
    retrain: Retrain
    tracking: Tracking

    def section(self, stage: str) -> Any:
        """The settings of a stage; a method's section may be absent.

        Raises ParamsError if they are.
        """
        settings = getattr(self, stage)
        if settings is None and stage == "distill":
            raise ParamsError(
                "distill is null in params.yaml, so there is no student to make. Give it the "
                "section of recipes/demo-distill.yaml."
            )
        if settings is None:
            raise ParamsError(
                f"align.method={self.align.method}, and params.yaml has no section {stage}. Copy "
                "it from recipes/base.yaml, or choose a method whose section is there."
            )
        return settings

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of this run, in order."""
        return stages_of(self.align.method, self.distill is not None)

    @property
    def final_stage(self) -> str:
        """The stage whose model is registered, promoted, exported and served."""
        return final_stage({"align": dict(self.align), "tracking": dict(self.tracking)})

    @property
    def unused(self) -> tuple[str, ...]:
        """The sections of methods that align.method does not name: nothing depends on them."""
        return tuple(method for method in METHODS if method != self.align.method)

    @property
    def trained_reward(self) -> Reward | None:
        """The settings of the reward model; None where a function takes its place."""
        return self.reward if isinstance(self.reward, Reward) else None

    @property
    def reward_name(self) -> str:
        """What scores the replies, in words."""
        return "reward function" if self.trained_reward is None else "reward model"

    @property
    def reward_score_name(self) -> str:
        """The score of the replies, in words."""
        return f"{self.reward_name.replace(' ', '-')} score"

    @property
    def start_from_sft(self) -> tuple[str, ...]:
        """The sections whose adapters start from the SFT model: as copies of its adapter, if it has one."""
        trained = self.trained_reward
        reward = ("reward",) if trained is not None and trained.init == "sft" else ()
        return (*reward, self.align.method)

    @model_validator(mode="after")
    def _addresses(self) -> "Params":
        content = self.model_dump(mode="json", exclude={"data": {"prompt_template"}})
        for setting, value in flat(content):
            if isinstance(value, str) and "://" in value:
                require_no_secret(setting, value)
        urls = {f"data.{name}": url for name, url in self.data.urls().items()}
        safety = self.retrain.safety_source
        if safety is not None and safety.is_url:
            urls["retrain.safety_source"] = safety.path
        for setting, url in urls.items():
            if reason := unreadable(url):
                raise ParamsError(f"{setting}.path={url} {reason}, in params.yaml.")
        return self

    @model_validator(mode="after")
    def _method_has_its_section(self) -> "Params":
        self.section(self.align.method)
        return self

    def _loops(self) -> Iterator[SamplingLoop]:
        """The sections of sampling loops in use; sections of other methods may be for a model of another size."""
        for section in (self.section(self.align.method), self.distill):
            if isinstance(section, SamplingLoop):
                yield section

    @model_validator(mode="after")
    def _registers_a_model(self) -> "Params":
        if self.tracking.model == "student" and self.distill is None:
            raise ParamsError(
                "tracking.model=student, and distill is null: this run makes no student. Set "
                "tracking.model: aligned, or give the section distill in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Params":
        limit = self.model.context_length
        method = self.align.method
        chosen = self.section(method)
        pairs: list[Any] = [chosen] if isinstance(chosen, Optimisation) else []
        rewards = [self.trained_reward] if self.trained_reward is not None else []
        for name, length in (
            ("sft.max_length", self.sft.max_length),
            *(("reward.max_length", section.max_length) for section in rewards),
            *((f"{loop.method}.max_new_tokens", loop.max_new_tokens + 1) for loop in self._loops()),
            *((f"{method}.max_length", section.max_length) for section in pairs),
            ("evaluate.max_new_tokens", self.evaluate.max_new_tokens + 1),
        ):
            if length > limit:
                raise ParamsError(
                    f"{name}={length} does not fit in model.context_length={limit}. Change either in params.yaml."
                )
        for name, batch in (
            ("sft", self.sft.batch_size),
            *(("reward", section.batch_size) for section in rewards),
            *((method, section.batch_size) for section in pairs),
        ):
            if batch % self.where.of(name).processes:
                raise ParamsError(
                    f"{name}.batch_size={batch} does not split over "
                    f"{self.where.key_and_value(name, 'processes')}. Change either in params.yaml."
                )
        return self

    @model_validator(mode="after")
    def _can_be_divided(self) -> "Params":
        for stage in SHARED_STAGES:
            section = getattr(self, stage)
            if section is None or stage in self.unused or isinstance(section, RewardFunction):
                continue
            level, written = self.where.of(stage).sharding, self.where.key_and_value(stage, "sharding")
            if level != "none" and section.optimizer == "adamw8bit":
                raise ParamsError(
                    f"{stage}.optimizer=adamw8bit keeps its moments in blocks that {written} would split. "
                    f"Set {stage}.optimizer: adamw, or where.{stage}.sharding: none in params.yaml."
                )
            if level not in WEIGHTS_DIVIDED:
                continue
            if self.model.dtype == "fp16":
                raise ParamsError(
                    f"model.dtype=fp16 scales the loss by the gradients of all weights, and {written} shards them. "
                    f"Set model.dtype: bf16, or where.{stage}.sharding: none in params.yaml."
                )
            if self.model.quantisation is not None:
                raise ParamsError(
                    f"model.quantisation={self.model.quantisation} packs weights into bytes that {written} cannot "
                    f"shard. Set model.quantisation: null, or where.{stage}.sharding: none in params.yaml."
                )
        for loop in self._loops():
            name, mini_batch = loop.method, loop.batch_size // loop.num_mini_batches
            place = self.where.of(name)
            if loop.rollout_engine == "vllm" and place.sharding in WEIGHTS_DIVIDED:
                raise ParamsError(
                    f"{name}.rollout_engine=vllm needs whole weights after each update, and "
                    f"{self.where.key_and_value(name, 'sharding')} shards them. Set {name}.rollout_engine: static, or "
                    f"where.{name}.sharding: none in params.yaml."
                )
            if place.sharding in WEIGHTS_DIVIDED and mini_batch < place.processes:
                raise ParamsError(
                    f"a mini-batch of {mini_batch} episodes ({name}.batch_size / {name}.num_mini_batches) "
                    f"leaves some of {self.where.key_and_value(name, 'processes')} without one, "
                    f"and with {self.where.key_and_value(name, 'sharding')} every process needs one. "
                    "Change one of them in params.yaml."
                )
        return self

    @model_validator(mode="after")
    def _function_replaces_the_reward_model(self) -> "Params":
        if self.trained_reward is not None:
            return self
        settings, method = self.section(self.align.method), self.align.method
        if isinstance(settings, ActorCritic):
            for key, value in (("value_init", "reward"), ("layout", "shared_base")):
                if getattr(settings, key) == value:
                    other = "sft" if key == "value_init" else "separate"
                    raise ParamsError(
                        f"{method}.{key}={value} needs a reward model, and reward.kind=function. "
                        f"Set {method}.{key}: {other} in params.yaml."
                    )
        judge = self.evaluate.judge
        if isinstance(judge, RewardModelJudgeSettings) and judge.path is None:
            raise ParamsError(
                "evaluate.judge.path=null trains a reward model with the settings of reward, and "
                "reward.kind is function. Name a model in params.yaml, or another judge."
            )
        return self

    @model_validator(mode="after")
    def _has_the_preferences_it_needs(self) -> "Params":
        form, method = getattr(self.data.source, "format", "pairs"), self.align.method
        needs = "reward.kind=model" if self.trained_reward is not None else f"align.method={method}"
        rated = form == "ratings" or self.data.feedback_source is not None
        learns = method in OFFLINE_METHODS and not (method == "kto" and rated)
        if form in NO_PREFERENCES and (self.trained_reward is not None or learns):
            raise ParamsError(
                f"data.source.format={form} has no preferences, and {needs} learns from them. Name another source, "
                "or set reward.kind: function and align.method: rloo or grpo in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _best_needs_validation_rows(self) -> "Params":
        for stage in self.stages:
            keep = getattr(self.section(stage) if stage not in SINGLE_STAGES else None, "keep", "")
            if keep == "best" and not self.data.validation_fraction:
                raise ParamsError(
                    f"{stage}.keep=best chooses by rows that training does not read, and "
                    "data.validation_fraction=0 leaves none. Set it, such as 0.1, or "
                    f"{stage}.keep: last in params.yaml."
                )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> "Params":
        reward = self.trained_reward
        if self.model.random is not None:
            for section, lora in (
                ("sft", self.sft.lora),
                ("reward", reward.lora if reward is not None and reward.init == "base" else None),
            ):
                if lora is not None:
                    raise ParamsError(
                        f"{section}.lora adapts a pretrained model, and the weights of model.random are random. "
                        f"Set {section}.lora: null, or model.path in params.yaml."
                    )
        self._adapters_are_like_their_start()
        method = self.align.method
        settings = self.section(method)
        if isinstance(settings, Online) and self.model.quantisation is not None and settings.lora is None:
            raise ParamsError(
                f"model.quantisation={self.model.quantisation} with {method}.lora null: "
                f"the policy would learn from other weights than its reference has. Set {method}.lora, "
                "or model.quantisation: null in params.yaml."
            )
        if (
            isinstance(settings, ActorCritic)
            and settings.layout == "shared_base"
            and reward is not None
            and (reward.lora is None or (reward.init == "base" and self.sft.lora is None))
        ):
            raise ParamsError(
                f"{method}.layout=shared_base needs a reward model that is an adapter on the SFT model's base; "
                f"reward.lora is {'null' if reward.lora is None else 'set'}, reward.init is {reward.init}. "
                f"Set reward.lora and reward.init: sft, or {method}.layout: separate in params.yaml."
            )
        return self

    def _adapters_are_like_their_start(self) -> None:
        """Refuse an adapter that cannot start as a copy of the SFT model's."""
        sft = self.sft.lora
        for section in self.start_from_sft:
            lora: Lora | None = self.section(section).lora
            difference = sft.difference(lora) if sft is not None and lora is not None else None
            if difference is not None:
                raise ParamsError(
                    f"{section}.lora.{difference}={getattr(lora, difference)} and "
                    f"sft.lora.{difference}={getattr(sft, difference)}: the adapter of {section} starts as a copy of "
                    "the SFT model's. Give both the same rank, alpha and modules in params.yaml."
                )
