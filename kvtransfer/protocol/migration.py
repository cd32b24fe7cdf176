"""A running answer moves from one decode worker to another: what the three roles share.

1. The gateway offers handoff m to the source: PostMigrate.
2. The source asks the target to promise every page the answer can still need, by count.
3. While it goes on decoding, the source copies full pages, which never change any more, in rounds;
   a round is one ordinary transfer (``sender`` and ``receiver``) with a lease of its own.
4. When few pages are left the source stops at a step's end, copies the rest with the partial page,
   and sends the ``Capsule``. The target is ready when all rounds and the capsule are there.
5. The source asks the gateway to commit, with every token that the gateway has not acknowledged.
   The gateway compares and sets: the first of commit and abort wins, for ever. It activates the
   target with the next attempt number.
6. The source gives its pages back once it hears COMMITTED (or that it was fenced). A source that
   does not know the outcome stays frozen and asks again; time never decides.

The stop strings and held-back text belong to the gateway and do not move. Penalties and the grammar
are rebuilt from the tokens before the target says that it is ready. A random number is a function
of seed and output position, so there is no generator to move.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh.wire.sampling import SamplingParams

MAX_ROUNDS = 3
"""Rounds of full pages before the source stops, however many pages were filled meanwhile."""
FEW_PAGES = 1
"""So many full pages may be left for the time when the answer stands still."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What does not change while an answer is generated."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    """As the request had it: ``max_tokens`` counts the whole answer."""
    sample_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Capsule:
    """All that a decode worker needs, beside the pages, to go on at the next position."""

    answer: Answer
    output: tuple[int, ...]
    """Every token of the answer so far; the last one has no latent yet."""
    computed: int
    """Positions (prompt and output) with latents in the pages."""
    num_pages: int
    """Pages that hold them; the last may be partial."""
    num_rounds: int
    """Rounds of pages that belong to this handoff."""
    pending_hidden: bytes = b""
    """Hidden states before the final norm whose MTP latents are not computed yet, raw bytes
    [k, hidden] in the model's dtype. Empty: the target begins with a step without drafts."""

    @property
    def sampling_position(self) -> int:
        """Output position of the next random number."""
        return len(self.output)
