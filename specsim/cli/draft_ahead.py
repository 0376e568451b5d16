"""`specsim draft-ahead`: drafting during verification, compared with plain speculation."""

from __future__ import annotations

from dataclasses import dataclass

from specsim.cli.command import Answer
from specsim.cli.console import print_notes, print_table
from specsim.cli.options import TUNING_SHARE_HELP, CostSettings, SeedSettings, TraceSettings
from specsim.io.settings import setting


@dataclass(frozen=True, kw_only=True)
class AheadOptions(SeedSettings, TraceSettings):
    """What is prepared, and on which device."""

    outcomes: tuple[int, ...] = setting((1, 2, 4, 8, 16), "Outcomes to prepare drafts for, increasing.")
    max_draft_tokens: int | None = setting(
        None, "Maximum draft length K, below the depth of the trace (default: one less).", low=1, high=254
    )
    devices: int = setting(2, "Devices: 2 if the drafter has its own, else 1.", low=1, high=2)
    tuning_share: float = setting(0.5, TUNING_SHARE_HELP)


def draft_ahead(options: AheadOptions, costs: CostSettings) -> Answer:
    """Compare drafting ahead with plain drafting.

    While a draft is verified, the drafter prepares the next one for the most probable outcomes of the verification: so
    many tokens accepted, and this candidate in the place of the next. Hits are counted on the recorded ranks of the
    target's tokens. Every row has the draft length that is fastest on the tuning sequences, and is reported on the
    others. "Gain" is the speed relative to plain speculation; PEARL prepares for one outcome, that all is accepted.

    Example: specsim draft-ahead TRACE --cost profile.json --outcomes 1,4,16
    """
    from specsim.learn.draft_ahead import draft_ahead as compare

    result = compare(
        options.trace,
        costs.read(),
        outcomes=options.outcomes,
        max_draft_tokens=options.max_draft_tokens,
        devices=options.devices,
        tuning_share=options.tuning_share,
        seed=options.seed,
    )

    def show() -> None:
        rows = [
            [
                row.mode,
                str(row.prepared or ""),
                str(row.k),
                f"{100 * row.hit_rate:.1f} %",
                f"{row.tau:.2f}",
                str(row.speedup),
                str(row.gain),
            ]
            for row in result.rows
        ]
        devices = "a device of its own" if result.devices == 2 else "the target's device"
        title = f"Drafting ahead on {devices}, {result.sequences} held-out sequences"
        print_table(title, ["mode", "outcomes", "K", "hit rate", "tau", "speedup [95 %]", "gain [95 %]"], rows)
        print(result)
        print_notes(result.notes)

    return Answer(result.as_dict(), show)
