"""The command line of speculate.py: answers one prompt, chats, or serves."""
from __future__ import annotations

import math
import signal
import sys
from argparse import Namespace
from dataclasses import replace
from functools import partial

import torch

from app import client, server
from app.answers import Alone, Method, OnServer, PlainApi, WithDrafts
from app.chat import Terminal, generation_config
from app.loading import (
    Models,
    find_drafter,
    fingerprints,
    load_models,
    load_target,
    load_target_alone,
)
from moa import DraftLimits
from netsim import MAX_DRAFT_TOKENS, Link
from plumbing import flags
from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import run_command
from plumbing.messages import Address
from plumbing.prompts import given_or_piped

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
        main_flag="--prompt",
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--prompt", metavar="TEXT",
                      help="default: standard input or, on a terminal, a chat")
    task.add_argument("--serve", type=flags.address, metavar="[HOST:]PORT",
                      help="be the server of --remote")
    flags.add_model_arguments(parser.add_argument_group("model"))
    flags.add_generation_arguments(parser.add_argument_group("text"))
    drafts = parser.add_argument_group(
        "drafts",
        "Trees, unless --draft-length is given. Without a size here, drafts end early where the "
        "drafter is unsure. At temperature 0 a CPU verifies at most 31 tokens of a draft.",
    )
    drafts.add_argument("--drafter", type=flags.path, metavar="DIR",
                        help="default: the one shipped for the model")
    add_draft_arguments(drafts)
    drafts.add_argument("--lookup", action="store_true",
                        help="where the last three tokens occurred before, draft what followed")
    drafts.add_argument("--no-speculation", action="store_true", help="the target alone")
    drafts.add_argument("--show", action="store_true",
                        help="color accepted tokens green, unverified ones yellow")
    drafts.add_argument("--trace", action="store_true",
                        help="show every draft, and what is kept")
    remote = parser.add_argument_group("the target on a server")
    remote.add_argument("--remote", nargs="?", const=OWN_SERVER, type=flags.address,
                        metavar="HOST:PORT", help="default: a second process on this machine")
    client.add_link_arguments(remote)
    remote.add_argument("--timeout", type=flags.time_limit,
                        help="how long to wait for a reply (default: ten times as long as for the "
                        "slowest so far, and at least a minute for the first)")
    remote.add_argument("--disconnect-after", type=flags.positive_int, default=math.inf,
                        metavar="N", help="simulate an outage of the network after N tokens")
    remote.add_argument("--disconnect-for", type=flags.duration, default=math.inf, metavar="TIME",
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
    if args.draft_length:
        return DraftLimits(args.draft_length)
    return tree_limits(args, tree)


def tree_limits(args: Namespace, tree: DraftLimits) -> DraftLimits:
    """Return the limits of trees: `tree` with the sizes that the command line states. If it states
    any, no draft ends early, however unsure the drafter is."""
    sizes = {
        "depth": args.draft_depth,
        "top_k": args.draft_top_k,
        "total_tokens": args.draft_tokens,
    }
    stated = {name: size for name, size in sizes.items() if size is not None}
    if not stated:
        return tree
    return replace(tree, **stated, min_confidence=0.0, min_probability=0.0)


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
    if args.trace or args.json:
        refuse(["show"], "has no effect with --trace or --json")


# --- From flags to a program ---


def main() -> None:
    run_command(run)


def run() -> None:
    parser = make_parser()
    args = parser.parse_args()
    check_arguments(parser, args)
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    if args.serve:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        server.serve(
            args.serve, args.model, args.drafter, args.device, dtype, server.announce_on_terminal
        )
        return
    chatting = args.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    # Read before the models are loaded: if there is nothing to read, no time is lost.
    question = "" if chatting else given_or_piped(args.prompt)
    models = load_needed_models(args, dtype)
    link = client.link_of(
        args.network,
        latency=args.latency,
        jitter=args.jitter,
        bandwidth=args.bandwidth,
        loss=args.loss,
    )
    method = choose_method(args, models, dtype, link or Link())
    config = generation_config(args, models.tokenizer)
    terminal = Terminal(
        models, method, config, bool(args.remote), args.show, args.trace, args.json
    )
    if chatting:
        terminal.chat(f"The target is {args.model}, {describe_place(args.remote, link)}.")
    else:
        terminal.answer_once(question)


def load_needed_models(args: Namespace, dtype: torch.dtype) -> Models:
    """Load the target, with a drafter if one is needed. A client loads only those layers of the
    target that its drafter reuses."""
    if not args.no_speculation:
        return load_models(args.model, args.drafter, args.device, dtype, remote=bool(args.remote))
    if not args.remote:
        return load_target_alone(args.model, args.device, dtype)
    # The client of a plain API does not run the target. It needs a tokenizer, and sizes.
    return Models(*load_target(args.model, args.device, dtype, last=0), drafter=None)


def choose_method(args: Namespace, models: Models, dtype: torch.dtype, link: Link) -> Method:
    """Return the way to answer prompts that the command line asks for. Start a server if it asks
    for a server of its own."""
    if not args.remote:
        if args.no_speculation:
            return Alone(models.target)
        return WithDrafts(models.target, models.drafter, choose_limits(args, TREE), args.lookup)
    folder = None if args.no_speculation else find_drafter(args.model, args.drafter)
    address = args.remote
    if address == OWN_SERVER:
        address = server.start_server(args.model, args.drafter, args.device, dtype)
    new_channel = partial(
        client.open_channel,
        address,
        link,
        args.seed,
        fingerprints=fingerprints(args.model, folder),
        outage_after=args.disconnect_after,
        outage_for=args.disconnect_for,
        timeout=args.timeout,
    )
    if args.no_speculation:
        return PlainApi(new_channel, models.target.config.vocab_size)
    return OnServer(new_channel, models.drafter, choose_limits(args, REMOTE_TREE), args.lookup)


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
