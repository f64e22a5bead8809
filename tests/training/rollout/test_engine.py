import collections
import gc
import weakref

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from config.work import cache_columns
from tests.training.support.tiny import FAMILIES, policy, prompts, tokenizer
from training.modeling.score_head import init_head
from training.modeling.sequences import sequence_logprobs
from training.rollout import kv_cache, static
from training.rollout.engine import Limits, Rollout, draw, sampling_noise
from training.rollout.kv_cache import DecodingCache
from training.rollout.static import generate

PAD, UNREACHABLE = 0, -1
PROMPTS = prompts(12)
STEPS = 15


def sampled(
    model: PreTrainedModel,
    chosen: list[list[int]],
    batch_size: int,
    eos: int = 2,
    temperature: float = 1.0,
    seed: int = 5,
    noise: Tensor | None = None,
) -> Rollout:
    noise = sampling_noise(len(chosen), STEPS, seed) if noise is None else noise
    return generate(model, chosen, noise, temperature, Limits(STEPS, eos, PAD), batch_size)


def frequent_token(model: PreTrainedModel) -> int:
    """A token that many responses contain: made the end of sequence, it lets them end at many lengths."""
    seen = collections.Counter(
        token for response in sampled(model, PROMPTS * 4, 48, UNREACHABLE).responses for token in set(response)
    )
    return seen.most_common(1)[0][0]


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_greedy_decoding_is_that_of_transformers(family: str, batch_size: int) -> None:
    model = policy(family=family)

    def theirs(prompt: list[int], eos: int | None) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=PAD,
        )
        return list(out[0, len(prompt) :].tolist())

    endless = [theirs(prompt, None) for prompt in PROMPTS]
    eos = collections.Counter(token for response in endless for token in response[3:9]).most_common(1)[0][0]
    expected = [theirs(prompt, eos) for prompt in PROMPTS]
    assert len({len(response) for response in expected}) > 1
    ours = generate(model, PROMPTS, None, 1.0, Limits(STEPS, eos, PAD), batch_size)
    assert ours.responses == expected
    assert ours.values is None


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_is_the_same_alone_and_in_any_batch(family: str) -> None:
    model = policy(family=family)
    eos = frequent_token(model)
    whole = sampled(model, PROMPTS, 12, eos)
    assert len({len(response) for response in whole.responses}) >= 3
    for batch_size in (1, 5):
        other = sampled(model, PROMPTS, batch_size, eos)
        assert other.responses == whole.responses
        for row, same in zip(other.logprobs, whole.logprobs, strict=True):
            torch.testing.assert_close(row, same, atol=1e-5, rtol=0)


def test_each_row_of_noise_owns_its_response() -> None:
    model = policy()
    eos = frequent_token(model)
    noise = sampling_noise(len(PROMPTS), STEPS, 5)
    straight = sampled(model, PROMPTS, 5, eos, noise=noise)
    order = torch.randperm(len(PROMPTS), generator=torch.Generator().manual_seed(1))
    shuffled = sampled(model, [PROMPTS[i] for i in order], 5, eos, noise=noise[order])
    assert shuffled.responses == [straight.responses[i] for i in order]
    assert sampled(model, PROMPTS, 5, eos, seed=6).responses != straight.responses


def test_noise_is_a_function_of_its_seed() -> None:
    noise = sampling_noise(200, 50, 9)
    assert torch.equal(noise, sampling_noise(200, 50, 9))
    assert not torch.equal(noise, sampling_noise(200, 50, 10))
    assert noise.shape == (200, 50)
    assert 0 <= float(noise.min()) < 0.001
    assert 0.999 < float(noise.max()) < 1


def test_responses_to_one_prompt_share_its_computation() -> None:
    model = policy()
    repeated = [prompt for prompt in PROMPTS[:3] for _ in range(4)]
    seen: list[tuple[int, int]] = []
    handle = model.base_model.embed_tokens.register_forward_hook(
        lambda module, args, output: seen.append(tuple(args[0].shape))
    )
    shared = sampled(model, repeated, 12)
    handle.remove()
    assert sum(rows for rows, columns in seen if columns > 1) == 3  # no prompt is of one token
    assert max(rows for rows, columns in seen if columns == 1) > 3
    for i, prompt in enumerate(repeated):
        alone = sampled(model, [prompt], 1, noise=sampling_noise(12, STEPS, 5)[i : i + 1])
        assert alone.responses[0] == shared.responses[i]
    assert len({tuple(response) for response in shared.responses}) == 12


def test_responses_that_ended_leave_the_batch() -> None:
    model = policy()
    eos = frequent_token(model)
    slots: list[int] = []
    handle = model.base_model.embed_tokens.register_forward_hook(
        lambda module, args, output: slots.append(args[0].numel())
    )
    result = sampled(model, PROMPTS * 4, 48, eos)
    handle.remove()
    # the last token of a response is never fed back
    needed = sum(len(response) - 1 for response in result.responses)
    assert len({len(response) for response in result.responses}) > 3
    assert sum(slots[-result_steps(result) :]) == needed


def result_steps(result: Rollout) -> int:
    """Forward passes that decoded: one less than the tokens of the longest response."""
    return max(map(len, result.responses)) - 1


def test_the_cache_grows_with_the_responses_not_with_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    eos = frequent_token(model)
    expected = sampled(model, PROMPTS, 12, eos)
    monkeypatch.setattr(kv_cache, "SPARE_COLUMNS", 2)
    allocated: list[int] = []
    advance = DecodingCache.advance

    def observed(cache: DecodingCache) -> None:
        advance(cache)
        allocated.append(cache.layers[0].keys.shape[2] - cache.columns)

    monkeypatch.setattr(DecodingCache, "advance", observed)
    assert sampled(model, PROMPTS, 12, eos).responses == expected.responses
    longest = max(map(len, PROMPTS)) + STEPS
    assert len(allocated) > 3
    assert max(allocated) <= max(2, longest // 4)
    allocated.clear()
    noise = sampling_noise(12, 40, 5)
    noise[:, :STEPS] = sampling_noise(12, STEPS, 5)
    long = generate(model, PROMPTS, noise, 1.0, Limits(40, eos, PAD), 12)
    assert [response[:STEPS] for response in long.responses] == expected.responses
    assert max(map(len, long.responses)) > 30


def test_prompts_are_read_in_pieces_and_answered_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    eos = frequent_token(model)
    expected = sampled(model, PROMPTS, 12, eos).responses
    buckets = static._buckets([len(prompt) for prompt in sorted(PROMPTS, key=len)])
    longest = max(map(len, PROMPTS))
    monkeypatch.setattr(static, "PREFILL_TOKENS", longest)
    lengths = sorted(map(len, PROMPTS))
    pieces = static._buckets(lengths)
    assert len(pieces) > len(buckets)
    assert all((last - first) * lengths[last - 1] <= longest for first, last in pieces)
    assert sampled(model, PROMPTS, 12, eos).responses == expected


def test_a_plan_knows_the_columns_of_the_cache() -> None:
    cache = DecodingCache(policy().config, [7, 3], torch.device("cpu"))
    for tokens in range(7, 400):
        assert cache.room == cache_columns(7, tokens)
        cache.advance()


def test_keys_and_values_are_gone_as_soon_as_the_responses_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[weakref.ref[DecodingCache]] = []
    advance = DecodingCache.advance

    def observed(cache: DecodingCache) -> None:
        advance(cache)
        caches.append(weakref.ref(cache))

    monkeypatch.setattr(DecodingCache, "advance", observed)
    # it comes when it likes: until then a cycle holds the cache beside everything that PPO does next
    gc.disable()
    try:
        sampled(policy(), PROMPTS, 5)
        assert len(caches) > 3
        assert [cache() for cache in caches] == [None] * len(caches)
    finally:
        gc.enable()


@pytest.mark.parametrize("window", [4, 9])
def test_greedy_decoding_sees_no_further_than_a_sliding_window(window: int) -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    mixed = Qwen2Config(
        **shape,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=2,
        initializer_range=0.3,
    )
    everywhere = MistralConfig(
        **shape, num_key_value_heads=1, sliding_window=window, initializer_range=0.3, pad_token_id=PAD
    )
    for model in (Qwen2ForCausalLM(mixed).eval(), MistralForCausalLM(everywhere).eval()):
        theirs = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=STEPS,
                do_sample=False,
                eos_token_id=None,
            )
            theirs.append(out[0, len(prompt) :].tolist())
        assert generate(model, PROMPTS, None, 1.0, Limits(STEPS, UNREACHABLE, PAD), 12).responses == theirs


# ---------------------------------------------------------------- ends


def test_a_response_ends_with_its_first_end_of_sequence_or_at_the_limit() -> None:
    model = policy()
    eos = frequent_token(model)
    responses = sampled(model, PROMPTS * 4, 48, eos).responses
    for response in responses:
        assert eos not in response[:-1]
        assert response[-1] == eos or len(response) == STEPS
    assert {response[-1] == eos for response in responses} == {True, False}


def test_a_response_may_be_the_end_of_sequence_alone() -> None:
    model = policy()
    first = sampled(model, PROMPTS[:1], 1, UNREACHABLE).responses[0][0]
    result = sampled(model, PROMPTS[:1], 1, first)
    assert result.responses == [[first]]
    assert len(result.logprobs[0]) == 1


# ---------------------------------------------------------------- probabilities


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_from_sampling_are_those_of_the_finished_sequence(family: str, temperature: float) -> None:
    model = policy(family=family)
    result = sampled(model, PROMPTS, 5, frequent_token(model), temperature)
    sequences = [[*prompt, *response] for prompt, response in zip(PROMPTS, result.responses, strict=True)]
    again = sequence_logprobs(model, sequences, [len(prompt) for prompt in PROMPTS], temperature, 10_000)
    for row, same in zip(result.logprobs, again, strict=True):
        torch.testing.assert_close((row - same).exp(), torch.ones(len(row)), atol=1e-5, rtol=0)


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """p-value of counts, tokens expected fewer than 5 times pooled."""
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    rare = expected < 5
    pools = [*expected[~rare].tolist(), *([float(expected[rare].sum())] if rare.any() else [])]
    pooled = [*counts[~rare].tolist(), *([int(counts[rare].sum())] if rare.any() else [])], pools
    return float(stats.chisquare(*pooled).pvalue)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_samples_follow_the_probabilities_of_the_model(temperature: float) -> None:
    model, prompt, draws = policy(), PROMPTS[0], 60_000
    result = generate(
        model, [prompt] * draws, sampling_noise(draws, 2, 3), temperature, Limits(2, UNREACHABLE, PAD), draws
    )
    vocabulary = len(tokenizer())

    def probabilities(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return torch.softmax(model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature, dim=-1)

    first = torch.tensor([response[0] for response in result.responses])
    assert chi_square_p(torch.bincount(first, minlength=vocabulary), probabilities(prompt)) > 1e-3
    common = int(torch.bincount(first).argmax())
    second = torch.tensor([response[1] for response in result.responses if response[0] == common])
    assert chi_square_p(torch.bincount(second, minlength=vocabulary), probabilities([*prompt, common])) > 1e-3
    other = probabilities(prompt).pow(1.2)
    assert chi_square_p(torch.bincount(first, minlength=vocabulary), other / other.sum()) < 1e-3


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 700])
def test_a_draw_falls_where_the_cumulative_probability_passes_it(vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    logits[[0, 3, vocabulary - 1]] = -torch.inf
    cumulative = torch.softmax(logits.double(), dim=0).cumsum(dim=0)
    middles = torch.cat([cumulative[:1] / 2, (cumulative[1:] + cumulative[:-1]) / 2])
    possible = (cumulative.diff(prepend=torch.zeros(1)) > 1e-5).nonzero().squeeze(1)
    tokens, logprobs = draw(logits.expand(len(possible), -1), middles[possible].float(), 1.0)
    assert tokens.tolist() == possible.tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, dim=0)[possible], atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [5, 256, 300, 513])
def test_the_ends_of_the_unit_interval_pick_tokens_of_positive_probability(vocabulary: int) -> None:
    logits = torch.full((3, vocabulary), -torch.inf)
    logits[:, [1, 3]] = torch.tensor([0.25, 0.75]).log()
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.2501, 1 - 2**-24]), 1.0)
    assert tokens.tolist() == [1, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25, 0.75, 0.75]), atol=1e-6, rtol=0)


# ---------------------------------------------------------------- values


def test_values_are_what_the_head_says_before_each_token() -> None:
    model = policy()
    head = nn.Linear(32, 1, bias=False)
    init_head(head, 3)
    result = generate(
        model, PROMPTS, sampling_noise(12, STEPS, 5), 1.0, Limits(STEPS, frequent_token(model), PAD), 5, head
    )
    assert result.values is not None
    for prompt, response, values in zip(PROMPTS, result.responses, result.values, strict=True):
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.tensor([[*prompt, *response]])).last_hidden_state[
                0, len(prompt) - 1 : -1
            ]
            torch.testing.assert_close(values, head(hidden).squeeze(-1), atol=1e-5, rtol=0)
