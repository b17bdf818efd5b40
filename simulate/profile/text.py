"""A profile as tables and sentences: 80 columns as text, on a terminal as wide as that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from nkw.parts import Hanging, Name, Noted, Part, Table, shortened, table
from nkw.terminal import rendered, report_of
from simulate.profile.advice.text import advice_parts
from simulate.profile.basis import CALLED
from simulate.profile.critical_path import Phase, Stretch
from simulate.profile.gaps import DONE, FIRST_BYTE, GapGroup
from simulate.profile.lines import LineTime
from simulate.profile.moments import Moments, named, source
from simulate.profile.numbers import share, us
from simulate.profile.profile import Profile
from simulate.timing import Reading
from simulate.timing.timeline import core_label

_CHAIN = 10  # stretches of the critical path that are spelled out
_GAPS = 3  # groups of gaps per track
_IN_SENTENCE = 34  # columns of a name in a sentence
_BUSY = 0.02  # tracks that are busy for less of the length are there to trigger others: their idle time says nothing


def text(profile: Profile, rows: int = 8, all_advice: bool = False) -> str:
    """The whole profile as text, with at most `rows` rows in each table: times in us, shares of the length."""
    return rendered(report(profile, rows, all_advice))


@report_of.register(Profile)
def report(profile: Profile, rows: int = 8, all_advice: bool = False) -> list[Part]:
    """The parts of a profile's text, for a terminal; of the advice the first three pieces, or all with the bounds."""
    blocks: list[list[Part]] = [_head(profile), _tracks(profile), _rates(profile)]
    if profile.length_ns:
        blocks += [_path(profile, rows), _gaps(profile)]
    if profile.traffic:
        blocks.append([traffic_table(profile, rows), *_more_traffic(profile, rows)])
    if profile.lines:
        blocks += [_lines(profile, rows), _what_if(profile, rows)]
        blocks += advice_parts(profile, all_advice)
    return [*blocks[0], *(part for block in blocks[1:] for part in ("", *block))]


def _head(profile: Profile) -> list[Part]:
    lengths = profile.timelines
    order = (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
    bounds = " <= ".join(f"{each.value} {us(lengths[each].length_ns)}" for each in order)
    head = f"{profile.title}: {us(profile.length_ns)} us ({profile.reading.value} reading)"
    out: list[Part] = [Hanging(head, style="bold"), Hanging(f"{bounds} us")]
    out.append(
        Hanging(
            f"device time; starting and ending the kernel takes {us(profile.timeline.overhead_ns)} us more, and a "
            f"synchronous call from the host about {us(profile.hardware.host_overhead_ns)} us on top"
        )
    )
    if profile.length_ns:
        length = profile.length_ns
        shares = ", ".join(
            f"{share(part, length)} {CALLED[each]}" for each, part in profile.basis.by_confidence
        )
        most = ", ".join(f"{name} {share(part, length)}" for name, _, part in profile.basis.by_number[:3])
        out.append(Hanging(f"the length rests on {shares} numbers; most on {most}"))
    return out


def _tracks(profile: Profile) -> list[Part]:
    timeline, core = profile.timeline, _last_core(profile)
    counts = Counter(timeline.track.tolist())
    rows = [
        (
            name,
            us(timeline.busy_ns[name]),
            share(timeline.busy_ns[name], timeline.length_ns),
            us(timeline.idle_ns[name]),
            str(counts[number]),
        )
        for number, name in enumerate(timeline.tracks)
        if counts[number] and name.startswith(f"{core} " if core else "")
    ]
    out: list[Part] = [table("track|busy us|busy|idle us|slices", rows)]
    if core:
        out.insert(0, f"{core} of {len(profile.streams)} cores, the one that ends last:")
    return out


def _last_core(profile: Profile) -> str:
    """How tracks name the core on which the critical path ends; empty where there is one only."""
    number = profile.moments.stream_number(profile.critical_path[-1].event) if profile.critical_path else 0
    return core_label(profile.streams, number)


def _rates(profile: Profile) -> list[Part]:
    roof = profile.roofline
    dma_rate = roof.dma_bytes / roof.length_ns if roof.length_ns else 0.0
    moved = (
        f"MB in {_counted(roof.transfers, 'transfer')}, {dma_rate:.1f} GB/s, "
        f"{share(dma_rate, roof.dma_peak)} of {roof.dma_peak:.0f}"
    )
    hbm = f"MB, {roof.hbm_rate:.1f} GB/s, MBU {share(roof.mbu, 1)} of {roof.hbm_peak:.0f}"
    mfu = f"MFU {share(roof.mfu, 1)} of {roof.peak / 1e3:.1f} (16-bit)"
    rows: list[tuple[Part, ...]] = [
        ("DMA", _mb(roof.dma_bytes), Hanging(moved)),
        ("HBM", _mb(roof.hbm_bytes), Hanging(hbm)),
        ("matmul", f"{roof.flops / 1e9:.3f}", Hanging(f"GFLOP, {roof.flops_rate / 1e3:.2f} TFLOP/s, {mfu}")),
    ]
    if roof.flops and abs(roof.own_peak / roof.peak - 1) > 1e-6:
        rows.append(("", share(roof.own_mfu, 1), f"of the {roof.own_peak / 1e3:.1f} of its operands"))
    out: list[Part] = [table("", rows, left=(0, 2), gap=1)]
    if roof.intensity is not None and roof.algorithmic_intensity is not None:
        out.append(
            Hanging(
                f"FLOP per byte: {roof.intensity:.1f} moved, {roof.algorithmic_intensity:.1f} needed; "
                f"the ridge of the roofline is at {roof.ridge:.1f}"
            )
        )
    if roof.least_ns:
        out.append(
            Hanging(
                f"roofline: {us(roof.least_ns)} us ({roof.bound} bound), "
                f"{share(roof.least_ns, roof.length_ns)} of the length"
            )
        )
    return out


def path_table(profile: Profile, rows: int) -> Table:
    """The `rows` lines that hold most of the critical path."""
    length = profile.length_ns
    lines = path_by_line(profile.moments, profile.critical_path)[:rows]
    listed = [
        (Name(line, f"{op} "), str(steps), us(total), share(total, length), mostly.value)
        for op, line, steps, total, mostly in lines
    ]
    return table("critical path, by line|steps|us|share|mostly", listed, left=(0, 4))


def _path(profile: Profile, rows: int) -> list[Part]:
    return [path_table(profile, rows), "", _chain_table(profile.critical_path, profile.moments)]


def _chain_table(path: Sequence[Stretch], moments: Moments) -> Table:
    """The longest stretches of the critical path in order of time, and how much lies between them."""
    rows: list[tuple[Part, ...]] = []
    last = -1
    for at in [*longest(path, _CHAIN), len(path)]:
        if at > last + 1:
            total = sum(each.length_ns for each in path[last + 1 : at])
            rows.append(("...", us(total), _counted(at - last - 1, "step"), ""))
        if at < len(path):
            each = path[at]
            what = Name(named(moments.line(each.event)), f"{moments.op(each.event)} ")
            rows.append((us(each.start_ns), us(each.length_ns), what, each.reason.name.replace("_", " ")))
        last = at
    return table("chain: start us|us|instruction|waits", rows, left=(2, 3))


def path_by_line(moments: Moments, path: Sequence[Stretch]) -> list[tuple[str, str, int, float, Phase]]:
    """The critical path by instruction and line: (op, line, steps, ns, the longest phase), the longest first."""
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    phases: dict[tuple[str, str], dict[Phase, float]] = {}
    for each in path:
        key = moments.op(each.event), named(moments.line(each.event))
        steps, total = sums.get(key, (0, 0.0))
        sums[key] = steps + 1, total + each.length_ns
        by_phase = phases.setdefault(key, {})
        for phase, part in each.phases:
            by_phase[phase] = by_phase.get(phase, 0.0) + part
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], item[0]))
    return [
        (*key, steps, total, max(phases[key], key=lambda phase: phases[key][phase], default=Phase.issue))
        for key, (steps, total) in ordered
    ]


def longest(path: Sequence[Stretch], count: int) -> list[int]:
    """The numbers of the longest stretches, in order of time."""
    ranked = sorted(range(len(path)), key=lambda at: (-path[at].length_ns, at))
    return sorted(ranked[:count])


def _gaps(profile: Profile) -> list[Part]:
    out: list[Part] = ["idle time, by cause"]
    timeline, length, core = profile.timeline, profile.length_ns, _last_core(profile)
    mine = [group for group in profile.idle if group.track.startswith(f"{core} " if core else "")]
    for track, groups in groupby(mine, key=lambda group: group.track):
        if timeline.busy_ns[track] < _BUSY * length:
            continue
        listed = list(groups)
        total = sum(group.total_ns for group in listed)
        out.append(f"{track}: idle {us(total)} us, {share(total, length)}")
        rows: list[tuple[Part, ...]] = [
            (us(group.total_ns), Hanging(f"us in {_counted(group.count, 'gap')}: {gap_sentence(group)}", 3))
            for group in listed[:_GAPS]
        ]
        if len(listed) > _GAPS:
            rest = sum(group.total_ns for group in listed[_GAPS:])
            rows.append((us(rest), f"us for other causes: {len(listed) - _GAPS}"))
        out.append(table("", rows, left=(1,), indent=2, gap=1))
    return out


def gap_sentence(group: GapGroup) -> str:
    """One sentence: the event that ended these gaps, and the event that it waited for."""
    if group.why == DONE:
        return DONE
    here = f"{group.op} {shortened(group.line, _IN_SENTENCE)}"
    if group.why == FIRST_BYTE:
        return f"first bytes of {here}"
    if not group.cause_op:
        return f"{here}, {group.why}"
    what = f" for {shortened(group.tensor, _IN_SENTENCE)}" if group.tensor else ""
    cause = f"{group.cause_op} {shortened(group.cause_line, _IN_SENTENCE)} on {group.cause_track}"
    return f"{here} waited{what}: {group.why} {cause}"


def traffic_table(profile: Profile, rows: int) -> Table:
    """The `rows` tensors in HBM that move most bytes."""
    listed = [
        (
            each.name,
            _mb(each.nbytes),
            _mb(each.read_bytes),
            _times(each.reads),
            _mb(each.written_bytes),
            _times(each.writes),
        )
        for each in profile.traffic[:rows]
    ]
    return table("HBM tensor|MB|read MB|times|written MB|times", listed)


def _more_traffic(profile: Profile, rows: int) -> list[Part]:
    rest = profile.traffic[rows:]
    return [f"{len(rest)} more with {_mb(sum(each.moved_bytes for each in rest))} MB"] if rest else []


def _mb(size: float) -> str:
    return f"{size / 1e6:.3f}"


def _times(often: float) -> str:
    """A ratio, in at most six characters below a million."""
    return f"{often:.{2 if often < 100 else 1 if often < 1000 else 0}f}"


def _lines(profile: Profile, rows: int) -> list[Part]:
    out: list[Part] = [_line_rows("line", profile.lines[:rows], profile.length_ns)]
    if profile.calling_lines:
        out += ["", _line_rows("line with its callees", profile.calling_lines[:rows], profile.length_ns)]
    return out


def _line_rows(head: str, times: Sequence[LineTime], length: float) -> Noted:
    rows = [
        (Name(named(each.line)), str(each.events), us(each.held_ns), share(each.path_ns, length))
        for each in times
    ]
    return Noted(table(f"{head}|events|held us|of length", rows), [source(each.line) for each in times])


def _what_if(profile: Profile, rows: int) -> list[Part]:
    gains = [each for each in profile.what_if if each.length_ns < each.before_ns]
    listed = [
        (
            Name(each.line, f"{each.what} ") if each.line else each.what,
            us(each.length_ns),
            f"{-100 * each.gain:.1f} %",
        )
        for each in gains[:rows]
    ]
    out: list[Part] = [table("twice as fast|us|change", listed)]
    rest = [each for each in profile.what_if if each.length_ns >= each.before_ns and not each.line]
    if rest:
        out.append(Hanging(f"no gain: {', '.join(each.what for each in rest)}"))
    return out


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
