"""How the roles of the loop are made from models/sft and models/reward, one function a layout.

              policy                      ref_policy            reward_model            value_model
separate      whole, or adapter on SFT    own, or adapter off   own                     own, whole
              or with an adapter
shared_trunk  whole, or adapter on SFT    own, or adapter off   own                     a head on
              the policy's trunk
shared_base   adapter on the one base     the base without it   adapter on the base     adapter on
              the base

RLOO and GRPO have the first three of `separate`, and no value model.
"Adapter off" is the SFT model, be that a base alone or a base with the SFT stage's own adapter,
which then stays on.
"""

from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config.errors import ModelError
from config.schema import Params
from config.sections.levers import Lora
from config.sections.online import Online, Ppo
from training.distributed import sharding
from training.distributed.model_files import replacing_by_first, save_adapter, save_model
from training.modeling.adapter_lineage import is_adapter, lineage, named_base, same_base
from training.modeling.adapters import (
    AdapterView,
    active,
    add_adapter,
    read_adapter,
    read_head,
)
from training.modeling.models import (
    adapter_name,
    autocast,
    check_folder,
    check_reward_folder,
    load_policy,
    load_reward_model,
    new_reward_model,
    reward_config,
)
from training.modeling.score_head import new_head, normalised_head
from training.process.stage import Stage
from training.rl.roles import Models, Role, Roles

M = TypeVar("M", bound=nn.Module)
POLICY, VALUE = "policy", "value"
"""The adapters that learn."""


class _Origin:
    """What all layouts are made from."""

    def __init__(self, stage: Stage, tokenizer: PreTrainedTokenizerBase) -> None:
        self.stage = stage
        self.params: Params = stage.params
        self.settings: Online = stage.params.section(stage.name)
        self.tokenizer = tokenizer
        self.sft, self.reward = stage.root / "models/sft", stage.root / "models/reward"
        self.device = stage.torch_device

    def place(self, module: M) -> M:
        """A model or a head that is to learn on the stage's device, whole or divided; never in
        training mode.
        """
        sharding.shard(module, self.stage, sums_gradients=True)
        return module.eval()

    def view(
        self,
        model: PreTrainedModel,
        adapters: tuple[str, ...],
        config: Any = None,
        score: nn.Linear | None = None,
    ) -> AdapterView:
        return AdapterView(model, adapters, autocast(self.params.model, self.device), config, score)


def load_roles(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Roles:
    """The roles of the stage's method, PPO's as `ppo.layout` says, from models/sft and
    models/reward.

    Raises ModelError if either is missing, damaged, of another vocabulary, or not made as the
    layout needs it.
    """
    origin = _Origin(stage, tokenizer)
    settings = origin.settings
    critic = settings if isinstance(settings, Ppo) else None
    if critic is not None and critic.layout == "shared_base":
        assert settings.lora is not None
        models = _shared_base(origin, settings.lora)
    else:
        policy, ref_policy = _policies(origin)
        reward_model = origin.place(
            load_reward_model(origin.reward, origin.params.model, tokenizer)
        )
        value_model = (
            _value_model(origin) if critic is not None and critic.layout == "separate" else None
        )
        head = None
        if critic is not None and critic.layout == "shared_trunk":
            head = origin.place(
                new_head(policy.config.hidden_size, stage.params.seed, origin.device)
            )
        models = Models(policy, ref_policy, reward_model, value_model, head)
    return Roles(models, settings, stage.params.model.dtype, stage)


def _policies(origin: _Origin) -> tuple[Role, Role]:
    """Policy and reference: two models, or with the method's lora one model with its adapter on and
    off.
    """
    params, lora = origin.params, origin.settings.lora
    if lora is None:
        policy, ref = (
            origin.place(load_policy(origin.sft, params.model, origin.tokenizer, trainable))
            for trainable in (True, False)
        )
        return policy, ref
    model = load_policy(origin.sft, params.model, origin.tokenizer)
    beneath = active(model)
    add_adapter(model, lora, POLICY, params.seed, f"{origin.settings.method}.lora")
    model = origin.place(model)
    return origin.view(model, (*beneath, POLICY)), origin.view(model, beneath)


def _value_model(origin: _Origin) -> Role:
    """A value model of its own, from ppo.value_init: whole, or a frozen base with an adapter and a
    head that learn.
    """
    params, settings = origin.params, origin.params.section("ppo")
    lora: Lora | None = settings.lora
    if lora is None:
        if settings.value_init == "reward":
            model = load_reward_model(origin.reward, params.model, origin.tokenizer, trainable=True)
            model.score = normalised_head(
                model.score, model.config.score_mean, model.config.score_std
            )
        else:
            model = new_reward_model(origin.sft, params.model, origin.tokenizer, params.seed)
        return origin.place(model)
    if settings.value_init == "reward":
        model = load_reward_model(origin.reward, params.model, origin.tokenizer)
        model.score = normalised_head(model.score, model.config.score_mean, model.config.score_std)
    else:
        model = new_reward_model(
            origin.sft, params.model, origin.tokenizer, params.seed, trainable=False
        )
    beneath = active(model)
    add_adapter(model, lora, VALUE, params.seed + 1, "ppo.lora")
    model = origin.place(model)
    return origin.view(model, (*beneath, VALUE), score=model.score)


def _shared_base(origin: _Origin, lora: Lora) -> Models:
    """One base for all four. The value model is a second copy of the reward model's adapter and
    head, or begins on the SFT model.
    """
    params, seed = origin.params, origin.params.seed
    settings: Ppo = params.section("ppo")
    check_reward_folder(origin.reward)
    of_sft, of_reward = lineage(origin.sft), lineage(origin.reward)
    if not is_adapter(origin.reward) or not same_base(of_sft, of_reward):
        stands = (
            f"stands on {of_reward.base}" if is_adapter(origin.reward) else "has weights of its own"
        )
        raise ModelError(
            f"ppo.layout=shared_base needs models/reward to be an adapter on {of_sft.base}, the "
            f"base of models/sft; it {stands}. "
            "Set reward.lora and reward.init: sft and run the reward stage, or ppo.layout: "
            "separate in params.yaml."
        )
    model = load_policy(origin.sft, params.model, origin.tokenizer)
    beneath = active(model)
    add_adapter(model, lora, POLICY, seed, "ppo.lora")
    reward = _stack(model, of_reward.adapters)
    if settings.value_init == "reward":
        read_adapter(model, origin.reward, VALUE)
        value = (*reward[:-1], VALUE)
    else:
        add_adapter(model, lora, VALUE, seed + 1, "ppo.lora")
        value = (*beneath, VALUE)
    model = origin.place(model)
    judge = new_head(model.config.hidden_size, seed, origin.device)
    read_head(origin.reward, judge)
    config = reward_config(model.config, origin.reward)
    if settings.value_init == "reward":
        critic = normalised_head(judge, config.score_mean, config.score_std)
    else:
        critic = new_head(model.config.hidden_size, seed, origin.device)
    return Models(
        policy=origin.view(model, (*beneath, POLICY)),
        ref_policy=origin.view(model, beneath),
        reward_model=origin.view(model, reward, config, judge.requires_grad_(False)),
        value_model=origin.view(model, value, score=origin.place(critic)),
        trunk_value_head=None,
    )


def _stack(model: PreTrainedModel, folders: tuple[Path, ...]) -> tuple[str, ...]:
    """Put the adapters of `folders` into the model, those that are there excepted; their names,
    lowest first.
    """
    for folder in folders:
        if adapter_name(folder) not in getattr(model, "peft_config", {}):
            check_folder(folder)
            read_adapter(model, folder, adapter_name(folder))
    return tuple(adapter_name(folder) for folder in folders)


def save_policy(stage: Stage, roles: Roles, tokenizer: PreTrainedTokenizerBase) -> None:
    """models/<method>: the policy's weights, or its adapter on models/sft. All processes ask, the
    first one writes.
    """
    target, policy = stage.root / "models" / stage.name, roles.policy
    with replacing_by_first(target) as folder:
        if isinstance(policy, AdapterView):
            base = named_base(stage.root / "models/sft", target)
            save_adapter(folder, policy.model, POLICY, base, None)
        else:
            save_model(folder, policy)
        if stage.rank == 0:
            tokenizer.save_pretrained(folder)
