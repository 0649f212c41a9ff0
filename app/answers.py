"""Ways to answer a prompt, and what an answer cost.

There are four ways: the target alone, with drafts, with a server that verifies, and with a server
that writes alone. Each is a class with a method `cycles`, which yields the rounds of the loop with
the time that they took. (The loop itself, `speculate`, measures nothing.) A `Generation` adds them
up:

    generation = answer(WithDrafts(target, drafter, limits), prompt, GenerationConfig())
    print(tokenizer.decode(generation.tokens), acceptance_length([generation]))
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic, perf_counter
from typing import Callable, Generator, Iterator, Protocol

from app.client import Channel, ReconnectingVerifier, RemoteDraftState, call_api
from app.exact import DetailedResult, ExactVerifier
from app.lookup import Lookup
from llama import GenerationConfig, Llama, generate
from moa import CacheUpdate, Draft, Drafter, DraftLimits, DraftState
from netsim import Traffic
from speculate import Cycle, TreeSampler, Verifier, speculate

# --- Cycles, and what they cost ---


class Origin(Enum):
    """Who wrote a token."""

    TARGET = auto()
    DRAFT = auto()  # the drafter, and the target accepted the token
    UNVERIFIED = auto()  # the drafter, and the target has not seen the token


@dataclass
class TimedCycle(Cycle):
    """A cycle, and what it cost. Where the target writes alone, every token is a cycle."""

    result: DetailedResult
    draft_seconds: float
    verify_seconds: float
    traffic: Traffic | None = None  # None if the target is on this machine
    is_late: bool = False  # a simulated outage overlapped the cycle

    @property
    def is_offline(self) -> bool:
        """Return whether the server was out of reach, and the drafter wrote the tokens alone."""
        return self.result.link == "offline"

    @property
    def origins(self) -> list[Origin]:
        """Return who wrote each token."""
        if self.is_offline:
            return [Origin.UNVERIFIED] * len(self.tokens)
        origins = [Origin.DRAFT] * len(self.result.accepted) + [Origin.TARGET]
        return origins[:len(self.tokens)]


Cycles = Generator[TimedCycle, None, None]  # an iterator that can be closed


@dataclass
class TimedState:
    """A draft state that notes when its newest draft was complete."""

    state: DraftState | Lookup
    drafted: float = 0.0  # a moment, in seconds of `perf_counter`

    def append_verified(self, update: CacheUpdate | None) -> None:
        self.state.append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        draft = self.state.draft(root, limits)
        self.drafted = perf_counter()
        return draft


def timed_cycles(
    verifier: Verifier,
    state: DraftState | Lookup,
    prompt: list[int],
    config: GenerationConfig,
    limits: DraftLimits,
) -> Cycles:
    """Run the loop, and time its cycles: up to the draft, and from there on. LSA counts as
    verification, because the verifier runs it."""
    timed = TimedState(state)
    start = timed.drafted = perf_counter()  # the prompt's cycle drafts nothing
    for cycle in speculate(verifier, timed, prompt, config, limits):
        end = perf_counter()
        yield TimedCycle(cycle.result, cycle.tokens, timed.drafted - start, end - timed.drafted)
        start = timed.drafted = perf_counter()


def cycles_of_tokens(tokens: Iterator[int], prompt: list[int]) -> Cycles:
    """Make a cycle of each token."""
    start = perf_counter()
    for token in tokens:
        result = DetailedResult([], token, update=None, draft=Draft(prompt[-1]))
        yield TimedCycle(result, [token], 0.0, perf_counter() - start)
        start = perf_counter()


def over_channel(channel: Channel, cycles: Cycles) -> Cycles:
    """Run cycles whose target is at the other end of a channel. Note each cycle's traffic, and
    whether an outage delayed the cycle. Begin the simulated outage when it is due, and close the
    channel at the end."""
    outage = channel.outage
    count = 0  # the number of tokens so far
    start = monotonic()
    try:
        for cycle in cycles:
            cycle.traffic = channel.traffic
            channel.traffic = Traffic()  # counts the next cycle
            cycle.is_late = outage.overlaps(start, monotonic())
            count += len(cycle.tokens)
            start = monotonic()
            outage.begin_if_due(count, start)
            yield cycle
    finally:
        channel.close()


# --- Four ways to answer ---


class Method(Protocol):
    """A way to answer prompts. The next four classes are such ways."""

    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        """Answer a prompt, cycle by cycle.

        Raise InputError if a server sends no first token, or if a plain API is lost later. In
        neither case can a drafter take over.
        """


@dataclass
class Alone:
    """The target writes alone."""

    model: Llama

    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        return cycles_of_tokens(generate(self.model, prompt, config), prompt)


@dataclass
class WithDrafts:
    """A drafter drafts, with `lookup` only where nothing can be copied, and the target verifies on
    this machine."""

    model: Llama
    drafter: Drafter
    limits: DraftLimits
    lookup: bool = False

    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        sampling = config.new_sampling(self.model.device)
        capacity = count_slots(prompt, config, self.limits)
        verifier = ExactVerifier(self.model, self.drafter, capacity, sampling)
        state = TreeSampler(self.drafter, capacity, sampling)
        if self.lookup:
            state = Lookup(state, self.model.config.vocab_size, sampling)
        return timed_cycles(verifier, state, prompt, config, self.limits)


NewChannel = Callable[[list[int]], Channel]  # opens a channel to a server for a prompt


@dataclass
class OnServer:
    """Drafts are made here, as in `WithDrafts`, and a server verifies."""

    new_channel: NewChannel
    drafter: Drafter
    limits: DraftLimits
    lookup: bool = False

    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        channel = self.new_channel(prompt)
        sampling = config.new_sampling(self.drafter.device)
        state = RemoteDraftState(self.drafter, count_slots(prompt, config, self.limits), sampling)
        verifier = ReconnectingVerifier(channel, state, config)
        if self.lookup:
            state = Lookup(state, self.drafter.target.config.vocab_size, sampling)
        return over_channel(channel, timed_cycles(verifier, state, prompt, config, self.limits))


@dataclass
class PlainApi:
    """A server writes alone, as behind a plain API."""

    new_channel: NewChannel
    vocab_size: int

    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        channel = self.new_channel(prompt)
        tokens = call_api(channel, prompt, config, self.vocab_size)
        return over_channel(channel, cycles_of_tokens(tokens, prompt))


def count_slots(prompt: list[int], config: GenerationConfig, limits: DraftLimits) -> int:
    """Return how many slots the target's and the drafter's caches need: for the text, the root of
    the newest draft, and the draft.

    The target's cache holds all tokens of a draft, at most total_tokens. The drafter's caches hold
    the nodes that it expands, at most top_k on each level.
    """
    drafted = max(limits.total_tokens, limits.depth * limits.top_k)
    return len(prompt) + config.max_new_tokens + 1 + drafted


# --- One answer ---


@dataclass
class Generation:
    """One answer, and what it cost. The first cycle, which reads the prompt, is not counted in
    target_calls, draft_seconds and verify_seconds."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    seconds: float = 0.0  # in all
    prompt_seconds: float = 0.0  # until the first token
    target_calls: int = 0
    drafted: int = 0  # the number of drafted tokens that the target decided on
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    network: Counter = field(default_factory=Counter)  # the sums of the cycles' Traffic
    outage: str = ""  # the reason why the drafter first wrote alone; empty if it never did
    disconnected: bool = False  # the network was down, or the connection had to be made again

    def record(self, cycles: Cycles) -> Cycles:
        """Yield each cycle, after adding it. However the answer ends, close `cycles` (and with it
        the channel to a server), and note how long it took."""
        start = perf_counter()
        try:
            for cycle in cycles:
                self.add(cycle)
                yield cycle
        finally:
            cycles.close()
            self.seconds = perf_counter() - start

    def add(self, cycle: TimedCycle) -> None:
        """Add a cycle."""
        result = cycle.result
        if not self.tokens:  # the prompt's cycle
            self.prompt_seconds = cycle.verify_seconds
        else:
            self.draft_seconds += cycle.draft_seconds
            self.verify_seconds += cycle.verify_seconds
            self.target_calls += not cycle.is_offline
            self.drafted += len(result.draft.tokens) - 1  # without the root
        self.outage = self.outage or result.reason
        self.disconnected |= cycle.is_late or result.link != "connected"
        self.tokens += cycle.tokens
        self.origins += cycle.origins
        if cycle.traffic is not None:
            self.network.update(vars(cycle.traffic))

    @property
    def unverified(self) -> int:
        return self.origins.count(Origin.UNVERIFIED)

    def statistics(self) -> dict:
        """Return what --json shows of this answer's cost."""
        statistics = {
            "new_tokens": len(self.tokens),
            "seconds": self.seconds,
            "tokens_per_second": tokens_per_second([self]),
            "target_calls": self.target_calls,
            "acceptance_length": acceptance_length([self]),
            "prompt_tokens": len(self.prompt),
            "prompt_seconds": self.prompt_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
        }
        if self.network:
            statistics |= self.network
            statistics["unverified_tokens"] = self.unverified
            statistics["disconnected"] = self.disconnected
        return statistics


def answer(method: Method, prompt: list[int], config: GenerationConfig) -> Generation:
    """Answer a prompt to the end. Raises InputError: see `Method.cycles`."""
    generation = Generation(prompt)
    for _ in generation.record(method.cycles(prompt, config)):
        pass
    return generation


def acceptance_length(answers: list[Generation]) -> float:
    """Return how many tokens a call of the target yields, without unverified tokens. The call that
    reads a prompt, and the first token, which comes from that call, are not counted."""
    new_tokens = sum(len(g.tokens) - 1 - g.unverified for g in answers)
    return new_tokens / max(1, sum(g.target_calls for g in answers))


def tokens_per_second(answers: list[Generation]) -> float:
    """Return tokens per second."""
    return sum(len(g.tokens) for g in answers) / sum(g.seconds for g in answers)
