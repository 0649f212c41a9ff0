"""What programs show of a cycle, beyond what the loop needs of it."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moa import Draft
from speculate import VerifyResult


@dataclass
class DetailedResult(VerifyResult):
    """A result with its circumstances. `link` is one of

        "connected"      the target has read the prompt, or verified the draft
        "reconnected"    the same, over a new connection; if the draft was lost with the old one,
                         the server has read the text again
        "offline"        the server is out of reach, and the drafter has written unverified tokens

    A target on this machine is always connected.
    """

    draft: Draft  # that was verified, perhaps without unlikely tokens; empty if none was
    logits: Tensor | None = None  # the target's, after each node, (1 + K, V), if they are known
    link: str = "connected"
    reason: str = ""  # why the link is offline
