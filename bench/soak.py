"""Kill `tiered train` with SIGKILL at instants spread over its life, resume it, and compare it with an undisturbed run.

usage: python bench/soak.py [--kills 200] [--seed 0]      one campaign of kills, its own table
                            [--update-on cpu|device]    the same on the simulated accelerator
       python bench/soak.py --ranks N [--kills 200]        training over N ranks, one killed or all at once
       python bench/soak.py --minutes N [--campaign NAME]  go on with campaigns whose counts add up: see campaigns.py

How children are killed is in nursery.py, what is compared in kills.py; rank_kills.py has both for ranks. The last line
is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs, and for what lies beside this file

from bench.campaigns import CAMPAIGNS, RESULTS, run, table  # order: the path first
from bench.kills import Kill, Verdict, campaign_in
from tests.rigs.available import off, refusal

__all__: list[str] = []


def main() -> int:
    """Run the campaign, print a table and one line of JSON; return 1 if anything was lost or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills between the first read and the last commit")
    parser.add_argument("--making", type=int, help="kills while the store is being made (default: a fifth of --kills)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--update-on", default="", choices=("cpu", "device"), help="compute on a simulated accelerator")
    parser.add_argument("--ranks", type=int, help="kill training over so many ranks")
    parser.add_argument("--directory", help="where to work (default: the temporary directory)")
    parser.add_argument("--minutes", type=float, help="go on for so long with --campaign, or with all, a share each")
    parser.add_argument("--campaign", help="its name in campaigns.py")
    parser.add_argument("--results", type=Path, help="where runs add up (default: bench/results/soak.json)")
    args = parser.parse_args()
    if args.minutes is not None or args.campaign is not None:
        return _go_on(args)
    if args.ranks is not None:
        return _kill_ranks(args)
    num_making = max(10, args.kills // 5) if args.making is None else args.making
    start = time.monotonic()
    with campaign_in(args.directory, args.seed, update_on=args.update_on) as campaign:
        life_s = campaign.undisturbed.reports[-1].time_s
        print(f"undisturbed: {campaign.num_steps} steps, {life_s:.2f} s, {len(campaign.undisturbed.reports)} reports")
        verdict = campaign.run(args.kills, num_making, on_kill=_print_wrong)
    _print_table(verdict)
    result = {
        "bench": "soak", "kills": len(verdict.kills), "inside_commit": verdict.num_inside_commit,
        "making": verdict.count("making"), "training": verdict.count("training"), "resuming": verdict.count("resuming"),
        "lost": sum(kill.is_lost for kill in verdict.kills), "wrong": len(verdict.wrong),
        "survivors": verdict.num_survivors, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(result))
    return 1 if verdict.wrong else 0


def _kill_ranks(args: argparse.Namespace) -> int:
    """Kill runs over ranks, some twenty times each; print a table and one line of JSON."""
    from bench.rank_kills import KILLS_A_RUN, RankKill, kill_many  # with torch, which the others load in children

    logging.getLogger("tiered").setLevel(logging.CRITICAL)  # survivors say why they leave
    start, kills, wrong = time.monotonic(), list[RankKill](), list[str]()
    while len(kills) < args.kills:
        seed = args.seed + -(-len(kills) // KILLS_A_RUN)
        found, complaint = kill_many(min(KILLS_A_RUN, args.kills - len(kills)), seed, world=args.ranks)
        kills += found
        wrong += [f"seed {seed}: {complaint}"] if complaint else []
        print(f"seed {seed}: {len(kills)} kills, {complaint or 'nothing lost, the same bits'}", flush=True)
    print(f"{'struck':<10}{'kills':>7}{'in commit':>11}{'lost':>6}   after a report of -> kills")
    for name, struck in (
        ("one rank", [kill for kill in kills if kill.num_victims == 1]),
        ("all ranks", [kill for kill in kills if kill.num_victims > 1]),
    ):
        spread = ", ".join(f"{word}: {num}" for word, num in Counter(kill.after for kill in struck).most_common())
        inside, lost = sum(kill.is_inside_commit for kill in struck), sum(kill.is_lost for kill in struck)
        print(f"{name:<10}{len(struck):>7}{inside:>11}{lost:>6}   {spread}")
    result = {
        "bench": "soak", "ranks": args.ranks, "kills": len(kills),
        "one_rank": sum(kill.num_victims == 1 for kill in kills),
        "inside_commit": sum(kill.is_inside_commit for kill in kills), "lost": sum(kill.is_lost for kill in kills),
        "wrong": wrong, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(result))
    return 1 if wrong else 0


def _go_on(args: argparse.Namespace) -> int:
    """Run the campaigns of campaigns.py, print the table of all runs and one line of JSON of these."""
    names = [args.campaign] if args.campaign else list(CAMPAIGNS)
    if args.campaign and args.campaign not in CAMPAIGNS:
        print(f"there is no campaign {args.campaign!r}; there is: {', '.join(CAMPAIGNS)}", file=sys.stderr)
        return 2
    results, done = args.results or RESULTS, []
    for name in names:
        rig = CAMPAIGNS[name].rig
        reason = refusal(rig) if rig else None
        if reason is not None:
            print(off(rig, reason))
            continue
        done.append(run(name, (args.minutes or 1.0) / len(names), results))
    print("\n".join(table(results)))
    counts = {entry.campaign: entry.cases for entry in done}
    num_wrong = sum(len(entry.wrong) for entry in done)
    print(json.dumps({"bench": "soak", "cases": counts, "wrong": num_wrong}))
    return 1 if num_wrong else 0


def _print_wrong(kill: Kill) -> None:
    if not kill.is_right:
        print(f"WRONG: {kill}", flush=True)


def _print_table(verdict: Verdict) -> None:
    print(f"{'phase':<10}{'kills':>7}{'in commit':>11}{'lost':>6}{'other bits':>12}   durable generation -> kills")
    for phase in ("making", "training", "resuming"):
        kills = [kill for kill in verdict.kills if kill.phase == phase]
        spread = Counter(kill.durable for kill in kills)
        print(
            f"{phase:<10}{len(kills):>7}{sum(k.is_inside_commit for k in kills):>11}{sum(k.is_lost for k in kills):>6}"
            f"{sum(not (k.same_losses and k.same_bits) for k in kills):>12}   "
            + ", ".join(f"{generation}: {num}" for generation, num in sorted(spread.items()))
        )


if __name__ == "__main__":
    sys.exit(main())
