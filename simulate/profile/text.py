"""A profile as text of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from simulate.profile.basis import CALLED
from simulate.profile.critical_path import Phase, Stretch
from simulate.profile.gaps import DONE, FIRST_BYTE, GapGroup
from simulate.profile.lines import LineTime
from simulate.profile.moments import Moments, columns, named, short, source
from simulate.profile.profile import Profile
from simulate.timing import Reading
from simulate.timing.timeline import core_label

COLUMNS = 80
_CHAIN = 10  # stretches of the critical path that are spelled out
_GAPS = 3  # groups of gaps per track
_BUSY = 0.02  # tracks that are busy for less of the length are there to trigger others: their idle time says nothing


def text(profile: Profile, rows: int = 8) -> str:
    """The whole profile, with at most `rows` rows in each table: times in us, shares of the length."""
    blocks = [_head(profile), _tracks(profile), _rates(profile)]
    if profile.length_ns:
        blocks += [_path(profile, rows), _gaps(profile)]
    if profile.traffic:
        blocks.append(traffic_table(profile, rows))
    if profile.lines:
        blocks += [_lines(profile, rows), _what_if(profile, rows)]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def _head(profile: Profile) -> list[str]:
    lengths = profile.timelines
    order = (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
    bounds = " <= ".join(f"{each.value} {us(lengths[each].length_ns)}" for each in order)
    head = f"{profile.title}: {us(profile.length_ns)} us ({profile.reading.value} reading)"
    out = [*_wrapped(head), *_wrapped(f"{bounds} us")]
    out.append(f"starting and ending the kernel: {us(profile.timeline.overhead_ns)} us on top")
    if profile.length_ns:
        length = profile.length_ns
        shares = ", ".join(
            f"{share(part, length)} {CALLED[each]}" for each, part in profile.basis.by_confidence
        )
        most = ", ".join(f"{name} {share(part, length)}" for name, _, part in profile.basis.by_number[:3])
        out += _wrapped(f"rests on {shares} numbers; most on {most}")
    return out


def _tracks(profile: Profile) -> list[str]:
    timeline = profile.timeline
    out = [f"{'track':<30s}{'busy us':>14s}{'busy':>9s}{'idle us':>14s}{'slices':>10s}"]
    counts = [0] * len(timeline.tracks)
    for number in timeline.track.tolist():
        counts[number] += 1
    listed = [(name, count) for name, count in zip(timeline.tracks, counts) if count]
    if len(profile.streams) > 1:
        core = _last_core(profile)
        listed = [(name, count) for name, count in listed if name.startswith(f"{core} ")]
        out.insert(0, f"{core} of {len(profile.streams)} cores, the one that ends last:")
    for name, count in listed:
        busy, idle = timeline.busy_ns[name], timeline.idle_ns[name]
        part = share(busy, timeline.length_ns)
        out.append(f"{name:<30s}{us(busy):>14s}{part:>9s}{us(idle):>14s}{count:>10d}")
    return out


def _last_core(profile: Profile) -> str:
    """How tracks name the core on which the critical path ends; empty where there is one only."""
    number = profile.moments.stream_number(profile.critical_path[-1].event) if profile.critical_path else 0
    return core_label(profile.streams, number)


def _rates(profile: Profile) -> list[str]:
    roof = profile.roofline
    out = [
        f"DMA     {roof.dma_bytes / 1e6:12.3f} MB in {_counted(roof.transfers, 'transfer')}, "
        f"{roof.dma_bytes / roof.length_ns if roof.length_ns else 0:.1f} GB/s, "
        f"{share(roof.dma_bytes / (roof.length_ns or 1), roof.dma_peak)} of {roof.dma_peak:.0f}",
        f"HBM     {roof.hbm_bytes / 1e6:12.3f} MB, {roof.hbm_rate:.1f} GB/s, "
        f"MBU {share(roof.mbu, 1)} of {roof.hbm_peak:.0f}",
        f"matmul  {roof.flops / 1e9:12.3f} GFLOP, {roof.flops_rate / 1e3:.2f} TFLOP/s, "
        f"MFU {share(roof.mfu, 1)} of {roof.peak / 1e3:.1f} (16-bit)",
    ]
    if roof.flops and abs(roof.own_peak / roof.peak - 1) > 1e-6:
        out.append(f"{'':8s}{share(roof.own_mfu, 1):>14s} of the {roof.own_peak / 1e3:.1f} of its operands")
    if roof.intensity is not None and roof.algorithmic_intensity is not None:
        out.append(
            f"FLOP per byte: {roof.intensity:.1f} moved, {roof.algorithmic_intensity:.1f} needed; "
            f"the roofline bends at {roof.ridge:.1f}"
        )
    if roof.least_ns:
        out.append(
            f"the peaks allow {us(roof.least_ns)} us ({roof.bound} bound): "
            f"{share(roof.least_ns, roof.length_ns)} of the length"
        )
    return out


def path_table(profile: Profile, rows: int) -> list[str]:
    """The `rows` lines that hold most of the critical path, under a heading."""
    path, moments, length = profile.critical_path, profile.moments, profile.length_ns
    out = [f"{'critical path, by line':<40s}{'steps':>7s}{'us':>12s}{'share':>9s}  mostly"]
    for op, line, steps, total, mostly in path_by_line(moments, path)[:rows]:
        where = _fit(f"{op} {short(line, 38 - len(op))}", 39)
        out.append(f"{where} {steps:>7d}{us(total):>12s}{share(total, length):>9s}  {mostly.value:.10}")
    return out


def _path(profile: Profile, rows: int) -> list[str]:
    path, moments = profile.critical_path, profile.moments
    out = [*path_table(profile, rows), ""]
    out.append(f"{'chain: start us':>15s}{'us':>12s}  {'instruction':<34s}waits")
    shown = _longest(path, _CHAIN)
    last = -1
    for at in shown:
        out += _skipped(path, last + 1, at)
        each = path[at]
        what = _fit(f"{moments.op(each.event)} {short(named(moments.line(each.event)), 22)}", 33)
        waits = each.reason.name.replace("_", " ")
        out.append(f"{us(each.start_ns):>15s}{us(each.length_ns):>12s}  {what} {waits}")
        last = at
    out += _skipped(path, last + 1, len(path))
    return out


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


def _longest(path: Sequence[Stretch], count: int) -> list[int]:
    """The numbers of the longest stretches, in order of time."""
    ranked = sorted(range(len(path)), key=lambda at: (-path[at].length_ns, at))
    return sorted(ranked[:count])


def _skipped(path: Sequence[Stretch], first: int, end: int) -> list[str]:
    if first >= end:
        return []
    total = sum(each.length_ns for each in path[first:end])
    return [f"{'...':>15s}{us(total):>12s}  {_counted(end - first, 'step')}"]


def _gaps(profile: Profile) -> list[str]:
    out = ["idle time, by what was waited for"]
    timeline, length, core = profile.timeline, profile.length_ns, _last_core(profile)
    mine = [group for group in profile.idle if group.track.startswith(f"{core} " if core else "")]
    for track, groups in groupby(mine, key=lambda group: group.track):
        if timeline.busy_ns[track] < _BUSY * length:
            continue
        listed = list(groups)
        total = sum(group.total_ns for group in listed)
        out.append(f"{track}: idle {us(total)} us, {share(total, length)}")
        for group in listed[:_GAPS]:
            gaps = _counted(group.count, "gap")
            out += _wrapped(f"{us(group.total_ns):>12s} us in {gaps}: {gap_sentence(group)}", " " * 16)
        if len(listed) > _GAPS:
            rest = sum(group.total_ns for group in listed[_GAPS:])
            out.append(f"{us(rest):>12s} us for other causes: {len(listed) - _GAPS}")
    return out


def gap_sentence(group: GapGroup) -> str:
    """What ended these gaps, and what that had waited for."""
    if group.why == DONE:
        return DONE
    here = f"{group.op} {short(group.line, 34)}"
    if group.why == FIRST_BYTE:
        return f"first bytes of {here}"
    if not group.cause_op:
        return f"{here}, {group.why}"
    what = f" for {short(group.tensor, 34)}" if group.tensor else ""
    return f"{here} waited{what}: {group.why} {group.cause_op} {short(group.cause_line, 34)} on {group.cause_track}"


def traffic_table(profile: Profile, rows: int) -> list[str]:
    """The `rows` tensors in HBM that move most bytes, under a heading."""
    out = [f"{'HBM tensor':<34s}{'MB':>11s}{'read MB':>11s}{'times':>7s}{'written':>10s}{'times':>7s}"]
    for each in profile.traffic[:rows]:
        out.append(
            f"{_fit(each.name, 33)} {each.nbytes / 1e6:>11.3f}{each.read_bytes / 1e6:>11.3f}"
            f"{_times(each.reads):>7s}{each.written_bytes / 1e6:>10.3f}{_times(each.writes):>7s}"
        )
    if len(profile.traffic) > rows:
        rest = profile.traffic[rows:]
        out.append(f"{len(rest)} more with {sum(each.moved_bytes for each in rest) / 1e6:.3f} MB")
    return out


def _times(often: float) -> str:
    """How often something is moved, in at most six characters below a million."""
    return f"{often:.{2 if often < 100 else 1 if often < 1000 else 0}f}"


def _lines(profile: Profile, rows: int) -> list[str]:
    out = _line_rows("line", profile.lines[:rows], profile.length_ns)
    if profile.calling_lines:
        out += ["", *_line_rows("line with all it calls", profile.calling_lines[:rows], profile.length_ns)]
    return out


def _line_rows(head: str, times: Sequence[LineTime], length: float) -> list[str]:
    out = [f"{head:<44s}{'events':>8s}{'held us':>13s}{'of length':>13s}"]
    for each in times:
        where = short(named(each.line), 43)
        out.append(
            f"{_fit(where, 43)} {each.events:>8d}{us(each.held_ns):>13s}{share(each.path_ns, length):>13s}"
        )
        code = source(each.line)
        if code:
            out.append(f"  {_cut(code, COLUMNS - 2)}")
    return out


def _what_if(profile: Profile, rows: int) -> list[str]:
    gains = [each for each in profile.what_if if each.length_ns < each.before_ns]
    out = [f"{'twice as fast':<52s}{'us':>14s}{'change':>14s}"]
    for each in gains[:rows]:
        what = f"{each.what} {short(each.line, 40)}" if each.line else each.what
        change = f"{-100 * each.gain:.1f} %"
        out.append(f"{_fit(what, 51)} {us(each.length_ns):>14s}{change:>14s}")
    rest = [each for each in profile.what_if if each.length_ns >= each.before_ns and not each.line]
    if rest:
        names = ", ".join(each.what for each in rest)
        out += _wrapped(f"no gain: {names}")
    return out


def _wrapped(sentence: str, indent: str = "  ") -> list[str]:
    filled = "".join(each + "\0" * (columns(each) - 1) for each in sentence)  # as long as it is wide
    lines = wrap(filled, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\0", "") for line in lines]


def us(nanoseconds: float) -> str:
    """Nanoseconds as microseconds."""
    return f"{nanoseconds / 1000:.3f}"


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _fit(words: str, width: int) -> str:
    """Words in exactly `width` columns of a terminal, cut at the end where they are longer."""
    if columns(words) > width:
        words = _cut(words, width - 3) + "..."
    return words + " " * (width - columns(words))


def _cut(words: str, width: int) -> str:
    """The beginning of words, in at most `width` columns."""
    while columns(words) > width:
        words = words[:-1]
    return words
