"""The command line of speculate.py: answers one prompt, chats, or serves.

The flags come first. From them `answer` loads the models, chooses a way to answer, and hands both
to a `Terminal`.
"""
from __future__ import annotations

import math
import signal
import sys
from argparse import Namespace
from functools import partial

import torch

from app import client, server
from app.answers import Alone, Method, NewChannel, OnServer, PlainApi, WithDrafts
from app.chat import Terminal
from app.loading import Models, find_drafter, fingerprints, load_models, load_target_alone
from llama import GenerationConfig
from moa import DraftLimits
from netsim import MAX_DRAFT_TOKENS, Link
from plumbing import flags
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import run_command
from plumbing.messages import Address
from plumbing.prompts import given_or_piped
from plumbing.terminal import shows_colors

# The sizes of trees, if the command line states none. They were tuned on 48 prompts of Spec-Bench,
# at temperature 0, on an Intel Xeon. EAGLE-2's trees have about 60 tokens. TREE is small: on a CPU
# every token beyond the first few makes the target's pass longer. REMOTE_TREE is larger, because
# each of its cycles also costs a round trip over the network.
TREE = DraftLimits(depth=6, top_k=3, total_tokens=8, min_confidence=0.15, min_probability=0.04)
REMOTE_TREE = DraftLimits(
    depth=16, top_k=3, total_tokens=31, min_confidence=0.1, min_probability=0.02
)

# --- Flags ---

OWN_SERVER = ("", 0)  # --remote without an address

EXAMPLES = """\
  python speculate.py --prompt "Explain why the sky is blue." --show
  python speculate.py                                        # a chat
  python speculate.py --remote --latency 21ms                # the target in a process of its own
  python speculate.py --prompt "Why?" --trace                # every draft, and what is kept
  python speculate.py --prompt "Why?" --temperature 0.7      # sampled trees
  python speculate.py --serve 7000                           # then, from another terminal:
  python speculate.py --remote localhost:7000 --network 4g\
"""


def make_parser() -> flags.Parser:
    parser = flags.Parser(
        description="Generate with a drafter: the target's own text, only sooner.",
        examples=EXAMPLES,
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="default: standard input or, on a terminal, a chat")
    add("--serve", type=flags.address, metavar="[HOST:]PORT", help="be the server of --remote")
    flags.add_model_arguments(parser.add_argument_group("model"))
    flags.add_generation_arguments(parser.add_argument_group("text"))
    drafts = parser.add_argument_group(
        "drafts",
        "Trees, unless --draft-length is given. Without a size here, drafts end early where the "
        "drafter is unsure. At temperature 0 a CPU verifies at most 31 tokens of a draft.",
    )
    add_draft_arguments(drafts)
    add = drafts.add_argument
    add("--drafter", type=flags.path, metavar="DIR",
        help="default: the one shipped for the model")
    add("--lookup", action="store_true",
        help="where the last three tokens occurred before, draft what followed")
    add("--no-speculation", action="store_true", help="the target alone")
    add("--show", action="store_true", help="color accepted tokens green, unverified ones yellow")
    add("--trace", action="store_true", help="show every draft, and what is kept")
    remote = parser.add_argument_group("the target on a server")
    add = remote.add_argument
    add("--remote", nargs="?", const=OWN_SERVER, type=flags.address, metavar="HOST:PORT",
        help="default: a second process on this machine")
    client.add_link_arguments(remote)
    add("--timeout", type=flags.time_limit,
        help="how long to wait for a reply (default: ten times as long as for the slowest so far, "
        "and at least a minute for the first)")
    add("--disconnect-after", type=flags.positive_int, default=math.inf, metavar="N",
        help="simulate an outage of the network after N tokens")
    add("--disconnect-for", type=flags.duration, default=math.inf, metavar="TIME",
        help="length of the simulated outage (default: it never ends)")
    return parser


def add_draft_arguments(parser: flags.ParserOrGroup) -> None:
    """Add the flags that `choose_limits` reads."""
    size = flags.number(int, 1, MAX_DRAFT_TOKENS)
    add = parser.add_argument
    add("--draft-depth", type=size, metavar="N",
        help=f"levels of a tree (default: {TREE.depth}, remote {REMOTE_TREE.depth})")
    add("--draft-top-k", type=flags.number(int, 2, MAX_DRAFT_TOKENS), metavar="N",
        help=f"nodes that a level expands (default: {TREE.top_k})")
    add("--draft-tokens", type=size, metavar="N",
        help=f"tokens of a tree (default: {TREE.total_tokens}, "
        f"remote {REMOTE_TREE.total_tokens})")
    add("--draft-length", type=size, metavar="K", help="draft chains of K tokens")


def choose_limits(args: Namespace, tree: DraftLimits) -> DraftLimits:
    """Return the limits of chains with --draft-length, else those of trees. tree: the defaults."""
    return DraftLimits(args.draft_length) if args.draft_length else tree_limits(args, tree)


def tree_limits(args: Namespace, tree: DraftLimits) -> DraftLimits:
    """Return the limits of trees: `tree` with the sizes that the command line states. If it states
    any, no draft ends early, however unsure the drafter is."""
    if not (args.draft_depth or args.draft_top_k or args.draft_tokens):
        return tree
    return DraftLimits(
        args.draft_depth or tree.depth,
        args.draft_top_k or tree.top_k,
        args.draft_tokens or tree.total_tokens,
    )


# Groups of flags that `check_arguments` refuses together. (A test compares them with the groups of
# `make_parser`.)
TREE_FLAGS = "draft_depth", "draft_top_k", "draft_tokens"
DRAFT_FLAGS = "lookup", "draft_length", *TREE_FLAGS, "show", "trace"
NETWORK_FLAGS = (
    "network", "latency", "jitter", "bandwidth", "loss", "timeout", "disconnect_after",
    "disconnect_for",
)
SERVER_FLAGS = {"serve", "model", "drafter", "device", "dtype"}  # a server refuses all others


def check_arguments(parser: flags.Parser, args: Namespace) -> None:
    """Refuse flags that contradict each other."""
    refuse = partial(parser.refuse, args)
    if args.serve:
        client_flags = sorted(vars(args).keys() - SERVER_FLAGS)
        refuse(client_flags, "is for the client: it has no effect with --serve")
    if not args.remote:
        refuse(NETWORK_FLAGS, "needs --remote")
    if args.disconnect_after == math.inf:
        refuse(["disconnect_for"], "needs --disconnect-after")
    if args.no_speculation:
        refuse(DRAFT_FLAGS, "is not for --no-speculation, which drafts nothing")
    if args.draft_length:
        refuse(TREE_FLAGS, "is a size of a tree, and --draft-length makes chains")


# --- From flags to an answer ---


def main() -> None:
    run_command(run)


def run() -> None:
    parser = make_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    if not args.serve:
        answer(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    server.serve(
        args.serve, args.model, args.drafter, args.device, dtype, server.announce_on_terminal
    )


def answer(args: Namespace) -> None:
    """Answer a prompt or, on a terminal, chat."""
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    if args.show and not shows_colors():
        print("--show: no colors, since the text does not go to a terminal", file=sys.stderr)
    chatting = args.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    # Read before the models are loaded: if there is nothing to read, no time is lost.
    question = "" if chatting else given_or_piped(args.prompt)
    link = client.link_of(
        args.network,
        latency=args.latency,
        jitter=args.jitter,
        bandwidth=args.bandwidth,
        loss=args.loss,
    )
    models, method = load_method(args, dtype, link or Link())
    stop_ids = frozenset(models.tokenizer.stop_ids)
    config = GenerationConfig(
        args.max_new_tokens, args.temperature, args.top_p, args.seed, stop_ids
    )
    terminal = Terminal(models, method, config, args.show, args.trace, args.json)
    if chatting:
        terminal.chat(f"The target is {args.model}, {describe_place(args.remote, link)}.")
    elif terminal.respond([{"role": "user", "content": question}]) is None:
        sys.exit(130)  # Ctrl-C: a shell expects this status


def load_method(args: Namespace, dtype: torch.dtype, link: Link) -> tuple[Models, Method]:
    """Load what the command line needs, and return the way to answer that it asks for."""
    remote = bool(args.remote)
    if args.no_speculation:
        # The client of a plain API does not run the target. It needs a tokenizer, and sizes.
        last = 0 if remote else None
        models = load_target_alone(args.model, args.device, dtype, last)
        if not remote:
            return models, Alone(models.target)
        size = models.target.config.vocab_size
        return models, PlainApi(channel_maker(args, dtype, link), size)
    models = load_models(args.model, args.drafter, args.device, dtype, remote)
    limits = choose_limits(args, REMOTE_TREE if remote else TREE)
    if not remote:
        return models, WithDrafts(models.target, models.drafter, limits, args.lookup)
    new_channel = channel_maker(args, dtype, link)
    return models, OnServer(new_channel, models.drafter, limits, args.lookup)


def channel_maker(args: Namespace, dtype: torch.dtype, link: Link) -> NewChannel:
    """Return a function that opens a channel to the server. Start the server, if it is to be one of
    our own."""
    if args.remote == OWN_SERVER:
        address = server.start_server(args.model, args.drafter, args.device, dtype)
        ours = {}  # it has loaded the same files
    else:
        address = args.remote
        folder = None if args.no_speculation else find_drafter(args.model, args.drafter)
        ours = fingerprints(args.model, folder)
    return partial(
        client.open_channel,
        address,
        link,
        args.seed,
        fingerprints=ours,
        outage_after=args.disconnect_after,
        outage_for=args.disconnect_for,
        timeout=args.timeout,
    )


def describe_place(server_address: Address | None, link: Link | None) -> str:
    """Say where the target is, for the greeting of a chat. link: None if none is simulated."""
    if server_address is None:
        return "on this machine"
    place = "in a server process of its own on this machine"
    if server_address != OWN_SERVER:
        host, port = server_address
        place = f"on the server at {host}:{port}"
    if link is None:
        return place
    return f"{place}, behind a simulated link of {1e3 * link.latency:.3g} ms each way"
