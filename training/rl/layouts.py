"""How the roles of the loop are made from models/sft and models/reward, one function a layout.

              policy                   ref_policy              reward_model        value_model
separate      whole, or an adapter     whole, or another       own                 own, whole or
              on the SFT model's base  adapter or none on it                       with an adapter
shared_trunk  the same                 the same                own                 a head on the
                                                                                   policy's trunk
shared_base   an adapter on the one    another adapter or      an adapter on       an adapter on
              base                     none on it              the base            the base

A method without a critic has the first three of `separate`, and no value model.
Each role has one adapter. Where models/sft is an adapter, it is the reference and the policy begins as its copy; where
it has weights of its own, they are the base: the reference is the base with no adapter on, and the policy's is new. A
value model begins in the same way from the model that `value_init` names.
"""

from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.errors import ModelError
from config.schema import Params
from config.sections.levers import Lora
from config.sections.online import ActorCritic, Online
from training.distributed import sharding
from training.distributed.model_files import replacing_on_rank0, save_adapter, save_model
from training.modeling.adapter_base import base_of, is_adapter, named_base, same_base
from training.modeling.adapters import (
    AdapterView,
    active,
    add_adapter,
    begin_adapter,
    lora_layers,
    read_adapter,
    read_head,
)
from training.modeling.models import (
    autocast,
    check_reward_folder,
    load_policy,
    load_reward_model,
    new_reward_model,
    reward_config,
)
from training.modeling.score_head import new_head, normalised_head
from training.process.stage import Stage
from training.rewards.function import is_function
from training.rl.learner import Role
from training.rl.roles import Models, Roles

M = TypeVar("M", bound=nn.Module)
POLICY, REWARD, VALUE = "policy", "reward", "value"
"""Names of adapters in the model; the reference uses the adapter that the model was loaded with."""


class _Origin:
    """Inputs shared by all layouts."""

    def __init__(self, stage: Stage, tokenizer: PreTrainedTokenizerBase) -> None:
        self.stage = stage
        self.params: Params = stage.params
        self.settings: Online = stage.params.section(stage.name)
        self.tokenizer = tokenizer
        self.sft, self.reward = stage.root / "models/sft", stage.root / "models/reward"
        self.device = stage.torch_device

    def place(self, module: M) -> M:
        """Move a trainable model or head to the stage's device, sharded if configured, in evaluation mode."""
        sharding.shard(module, self.stage, sums_gradients=True)
        return module.eval()

    def view(
        self, model: PreTrainedModel, adapter: str | None, config: Any = None, score: nn.Linear | None = None
    ) -> AdapterView:
        return AdapterView(model, adapter, autocast(self.params.model, self.device), config, score)


def load_roles(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Roles:
    """The roles of the stage's method, with a critic as its `layout` says, from models/sft and models/reward.

    Raises ModelError if either is missing, damaged, of another vocabulary, or unsuitable for the layout.
    """
    origin = _Origin(stage, tokenizer)
    settings = origin.settings
    critic = settings if isinstance(settings, ActorCritic) else None
    if critic is not None and critic.layout == "shared_base":
        assert settings.lora is not None
        models = _shared_base(origin, settings.lora)
    else:
        policy, ref_policy = _policies(origin)
        reward_model = None
        if not is_function(origin.reward):
            reward_model = origin.place(load_reward_model(origin.reward, origin.params.model, tokenizer))
        value_model = _value_model(origin) if critic is not None and critic.layout == "separate" else None
        head = None
        if critic is not None and critic.layout == "shared_trunk":
            head = origin.place(new_head(policy.config.hidden_size, stage.params.seed, origin.device))
        models = Models(policy, ref_policy, reward_model, value_model, head)
    return Roles(models, settings, stage.params.model.dtype, stage)


def _policies(origin: _Origin) -> tuple[Role, Role]:
    """Policy and reference: two models, or with LoRA one base with an adapter each (the reference has one only if
    models/sft is an adapter).
    """
    params, lora = origin.params, origin.settings.lora
    if lora is None:
        policy, ref = (
            origin.place(load_policy(origin.sft, params.model, origin.tokenizer, trainable))
            for trainable in (True, False)
        )
        return policy, ref
    model = load_policy(origin.sft, params.model, origin.tokenizer)
    reference = active(lora_layers(model))
    section = f"{origin.settings.method}.lora"
    begin_adapter(model, lora, POLICY, params.seed, section, origin.sft)
    model = origin.place(model)
    return origin.view(model, POLICY), origin.view(model, reference)


def _value_model(origin: _Origin) -> Role:
    """A separate value model from `value_init`: all weights trained, or a frozen base with a trained adapter and head.
    A reward model's adapter keeps its rank and matrices.
    """
    params, settings = origin.params, origin.settings
    assert isinstance(settings, ActorCritic)
    lora, section = settings.lora, f"{settings.method}.lora"
    if lora is None:
        if settings.value_init == "reward":
            model = load_reward_model(origin.reward, params.model, origin.tokenizer, trainable=True)
            model.score = normalised_head(model.score, model.config.score_mean, model.config.score_std)
        else:
            model = new_reward_model(origin.sft, params.model, origin.tokenizer, params.seed)
        return origin.place(model)
    if settings.value_init == "reward":
        model = load_reward_model(origin.reward, params.model, origin.tokenizer, adapter=VALUE)
        model.score = normalised_head(model.score, model.config.score_mean, model.config.score_std)
        if not is_adapter(origin.reward):
            add_adapter(model, lora, VALUE, params.seed + 1, section)
    else:
        model = new_reward_model(origin.sft, params.model, origin.tokenizer, params.seed, False, adapter=None)
        begin_adapter(model, lora, VALUE, params.seed + 1, section, origin.sft)
    model = origin.place(model)
    return origin.view(model, VALUE, score=model.score)


def _shared_base(origin: _Origin, lora: Lora) -> Models:
    """One base for all four. The value model starts as a copy of the reward model's adapter and head, or from the SFT
    model.
    """
    params, seed = origin.params, origin.params.seed
    settings = origin.settings
    assert isinstance(settings, ActorCritic)
    section = f"{settings.method}.lora"
    check_reward_folder(origin.reward)
    if not is_adapter(origin.reward) or not same_base(origin.sft, origin.reward):
        stands = (
            f"has the base {base_of(origin.reward).place}" if is_adapter(origin.reward) else "has weights of its own"
        )
        raise ModelError(
            f"{settings.method}.layout=shared_base needs models/reward to be an adapter on "
            f"{base_of(origin.sft).place}, the base of models/sft; it {stands}. Set reward.lora and reward.init: "
            f"sft and run the reward stage, or {settings.method}.layout: separate in params.yaml."
        )
    model = load_policy(origin.sft, params.model, origin.tokenizer)
    reference = active(lora_layers(model))
    begin_adapter(model, lora, POLICY, seed, section, origin.sft)
    read_adapter(model, origin.reward, REWARD)
    if settings.value_init == "reward":
        read_adapter(model, origin.reward, VALUE)
    else:
        begin_adapter(model, lora, VALUE, seed + 1, section, origin.sft)
    model = origin.place(model)
    judge = new_head(model.config.hidden_size, seed, origin.device)
    read_head(origin.reward, judge)
    config = reward_config(model.config, origin.reward)
    if settings.value_init == "reward":
        critic = normalised_head(judge, config.score_mean, config.score_std)
    else:
        critic = new_head(model.config.hidden_size, seed, origin.device)
    return Models(
        policy=origin.view(model, POLICY),
        ref_policy=origin.view(model, reference),
        reward_model=origin.view(model, REWARD, config, judge.requires_grad_(False)),
        value_model=origin.view(model, VALUE, score=origin.place(critic)),
        trunk_value_head=None,
    )


def save_policy(stage: Stage, roles: Roles, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the policy to models/<method>: its weights, or its adapter on the SFT model's base. Collective; rank 0
    writes.
    """
    target, policy = stage.root / "models" / stage.name, roles.policy
    with replacing_on_rank0(target) as folder:
        if isinstance(policy, AdapterView):
            base = named_base(stage.root / "models/sft", target)
            save_adapter(folder, policy.model, POLICY, *base)
        else:
            save_model(folder, policy)
        if stage.rank == 0:
            tokenizer.save_pretrained(folder)
