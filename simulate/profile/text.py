"""Profile as tables and sentences: 80 columns wide as text, as wide as the terminal on a terminal.

A track is an engine or a DMA queue of a core. A reading is an assumption on what overlaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from nkw.report import Hanging, Name, Noted, Part, Table, shorten_name, table
from nkw.terminal import rendered, report_of
from simulate.profile.advice.text import make_advice_parts
from simulate.profile.basis import CALLED
from simulate.profile.critical_path import Phase, Stretch
from simulate.profile.gaps import DONE, FIRST_BYTE, GapGroup
from simulate.profile.lines import LineTime
from simulate.profile.moments import Moments, format_line, read_source_line
from simulate.profile.numbers import format_share, format_us
from simulate.profile.profile import Profile
from simulate.timing import Reading
from simulate.timing.timeline import format_core_label

_CHAIN = 10  # longest stretches of the critical path that the chain lists
_GAPS = 3  # groups of gaps per track
_IN_SENTENCE = 34  # columns of a line or tensor in a sentence
_BUSY = 0.02  # least busy share of a track whose gaps are listed; tracks below it only trigger other tracks


def text(profile: Profile, rows: int = 8, all_advice: bool = False) -> str:
    """Return the profile as text of 80 columns; times are in us, shares are of the length of the launch.

    Args:
        rows: Most rows of each table.
        all_advice: Show all advice and the vendor's bounds; by default, the first three pieces of advice.
    """
    return rendered(make_report(profile, rows, all_advice))


@report_of.register(Profile)
def make_report(profile: Profile, rows: int = 8, all_advice: bool = False) -> list[Part]:
    """Return the parts of a profile's text for a terminal.

    Args:
        rows: Most rows of each table.
        all_advice: Show all advice and the vendor's bounds; by default, the first three pieces of advice.
    """
    blocks: list[list[Part]] = [_make_head(profile), _make_track_table(profile), _make_rates(profile)]
    if profile.length_ns:
        blocks += [_make_path_tables(profile, rows), _make_gap_tables(profile)]
    if profile.traffic:
        blocks.append([make_traffic_table(profile, rows), *_count_more_traffic(profile, rows)])
    if profile.lines:
        blocks += [_make_line_tables(profile, rows), _make_what_if_table(profile, rows)]
        blocks += make_advice_parts(profile, all_advice)
    return [*blocks[0], *(line for block in blocks[1:] for line in ("", *block))]


def _make_head(profile: Profile) -> list[Part]:
    """Return the title, the lengths of all readings, the overheads, and the confidence of the length."""
    lengths = profile.timelines
    order = (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
    bracket = " <= ".join(f"{reading.value} {format_us(lengths[reading].length_ns)}" for reading in order)
    head = f"{profile.title}: {format_us(profile.length_ns)} us ({profile.reading.value} reading)"
    out: list[Part] = [Hanging(head, style="bold"), Hanging(f"{bracket} us")]
    out.append(
        Hanging(
            "device time; starting and ending the kernel takes "
            f"{format_us(profile.timeline.overhead_ns)} us more, and a synchronous call from the host about "
            f"{format_us(profile.hardware.host_overhead_ns)} us on top"
        )
    )
    if profile.length_ns:
        length = profile.length_ns
        shares = ", ".join(
            f"{format_share(confidence_ns, length)} {CALLED[confidence]}"
            for confidence, confidence_ns in profile.basis.by_confidence
        )
        most = ", ".join(
            f"{name} {format_share(number_ns, length)}" for name, _, number_ns in profile.basis.by_number[:3]
        )
        out.append(Hanging(f"the length rests on {shares} numbers; most on {most}"))
    return out


def _make_track_table(profile: Profile) -> list[Part]:
    """Return the table of busy and idle time by track, for the core that ends last."""
    timeline, core = profile.timeline, _find_last_core(profile)
    counts = Counter(timeline.track.tolist())
    rows = [
        (
            name,
            format_us(timeline.busy_ns[name]),
            format_share(timeline.busy_ns[name], timeline.length_ns),
            format_us(timeline.idle_ns[name]),
            str(counts[number]),
        )
        for number, name in enumerate(timeline.tracks)
        if counts[number] and name.startswith(f"{core} " if core else "")
    ]
    out: list[Part] = [table("track|busy us|busy|idle us|slices", rows)]
    if core:
        out.insert(0, f"{core} of {len(profile.streams)} cores, the one that ends last:")
    return out


def _find_last_core(profile: Profile) -> str:
    """Return the prefix of track names of the core on which the critical path ends; empty for a single core."""
    number = profile.moments.stream_number(profile.critical_path[-1].event) if profile.critical_path else 0
    return format_core_label(profile.streams, number)


def _make_rates(profile: Profile) -> list[Part]:
    """Return the table of rates against peaks, and the sentences about intensity and roofline."""
    roof = profile.roofline
    dma_rate = roof.dma_bytes / roof.length_ns if roof.length_ns else 0.0
    moved = (
        f"MB in {_format_count(roof.transfers, 'transfer')}, {dma_rate:.1f} GB/s, "
        f"{format_share(dma_rate, roof.dma_peak)} of {roof.dma_peak:.0f}"
    )
    hbm = f"MB, {roof.hbm_rate:.1f} GB/s, MBU {format_share(roof.mbu, 1)} of {roof.hbm_peak:.0f}"
    mfu = f"MFU {format_share(roof.mfu, 1)} of {roof.peak / 1e3:.1f} (16-bit)"
    rows: list[tuple[Part, ...]] = [
        ("DMA", _format_mb(roof.dma_bytes), Hanging(moved)),
        ("HBM", _format_mb(roof.hbm_bytes), Hanging(hbm)),
        ("matmul", f"{roof.flops / 1e9:.3f}", Hanging(f"GFLOP, {roof.flops_rate / 1e3:.2f} TFLOP/s, {mfu}")),
    ]
    if roof.flops and abs(roof.operand_peak / roof.peak - 1) > 1e-6:
        rows.append(
            ("", format_share(roof.operand_mfu, 1), f"of the {roof.operand_peak / 1e3:.1f} of its operands")
        )
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
                f"roofline: {format_us(roof.least_ns)} us ({roof.bound} bound), "
                f"{format_share(roof.least_ns, roof.length_ns)} of the length"
            )
        )
    return out


def make_path_table(profile: Profile, rows: int) -> Table:
    """Return the table of the `rows` instructions, by kernel line, with the largest parts of the critical path."""
    length = profile.length_ns
    lines = sum_path_by_line(profile.moments, profile.critical_path)[:rows]
    table_rows = [
        (
            Name(line, f"{op} "),
            str(steps),
            format_us(line_ns),
            format_share(line_ns, length),
            longest_phase.value,
        )
        for op, line, steps, line_ns, longest_phase in lines
    ]
    return table("critical path, by line|steps|us|share|mostly", table_rows, left=(0, 4))


def _make_path_tables(profile: Profile, rows: int) -> list[Part]:
    """Return the two tables of the critical path: by line, and its longest stretches in order of time."""
    return [make_path_table(profile, rows), "", _make_chain_table(profile.critical_path, profile.moments)]


def _make_chain_table(path: Sequence[Stretch], moments: Moments) -> Table:
    """Return the table of the ten longest stretches in order of time.

    Between them, a row for the omitted ones.
    """
    rows: list[tuple[Part, ...]] = []
    previous = -1
    for index in [*find_longest(path, _CHAIN), len(path)]:
        if index > previous + 1:
            total = sum(skipped.length_ns for skipped in path[previous + 1 : index])
            rows.append(("...", format_us(total), _format_count(index - previous - 1, "step"), ""))
        if index < len(path):
            stretch = path[index]
            instruction = Name(format_line(moments.line(stretch.event)), f"{moments.op(stretch.event)} ")
            rows.append(
                (
                    format_us(stretch.start_ns),
                    format_us(stretch.length_ns),
                    instruction,
                    stretch.reason.name.replace("_", " "),
                )
            )
        previous = index
    return table("chain: start us|us|instruction|waits", rows, left=(2, 3))


def sum_path_by_line(moments: Moments, path: Sequence[Stretch]) -> list[tuple[str, str, int, float, Phase]]:
    """Sum the stretches of a critical path by instruction and line.

    Returns:
        Rows of (instruction, line such as `kernel.py:12`, number of stretches, ns, phase with most ns), in
            descending order of ns.
    """
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    phases: dict[tuple[str, str], dict[Phase, float]] = {}
    for stretch in path:
        key = moments.op(stretch.event), format_line(moments.line(stretch.event))
        steps, line_ns = sums.get(key, (0, 0.0))
        sums[key] = steps + 1, line_ns + stretch.length_ns
        by_phase = phases.setdefault(key, {})
        for phase, phase_ns in stretch.phases:
            by_phase[phase] = by_phase.get(phase, 0.0) + phase_ns
    ordered = sorted(sums.items(), key=lambda entry: (-entry[1][1], entry[0]))
    return [
        (*key, steps, line_ns, max(phases[key], key=lambda phase: phases[key][phase], default=Phase.issue))
        for key, (steps, line_ns) in ordered
    ]


def find_longest(path: Sequence[Stretch], count: int) -> list[int]:
    """Return the indices in `path` of the `count` longest stretches, in order of time."""
    ranked = sorted(range(len(path)), key=lambda index: (-path[index].length_ns, index))
    return sorted(ranked[:count])


def _make_gap_tables(profile: Profile) -> list[Part]:
    """Return idle times by track and cause, for tracks of the core that ends last.

    Tracks that are busy less than 2 % of the length are left out.
    """
    out: list[Part] = ["idle time, by cause"]
    timeline, length, core = profile.timeline, profile.length_ns, _find_last_core(profile)
    core_groups = [group for group in profile.idle if group.track.startswith(f"{core} " if core else "")]
    for track, groups in groupby(core_groups, key=lambda group: group.track):
        if timeline.busy_ns[track] < _BUSY * length:
            continue
        listed = list(groups)
        idle_ns = sum(group.total_ns for group in listed)
        out.append(f"{track}: idle {format_us(idle_ns)} us, {format_share(idle_ns, length)}")
        rows: list[tuple[Part, ...]] = [
            (
                format_us(group.total_ns),
                Hanging(f"us in {_format_count(group.count, 'gap')}: {format_gap_group(group)}", 3),
            )
            for group in listed[:_GAPS]
        ]
        if len(listed) > _GAPS:
            omitted_ns = sum(group.total_ns for group in listed[_GAPS:])
            rows.append((format_us(omitted_ns), f"us for other causes: {len(listed) - _GAPS}"))
        out.append(table("", rows, left=(1,), indent=2, gap=1))
    return out


def format_gap_group(group: GapGroup) -> str:
    """Return a sentence that names the event which ended the gaps, and the event that it waited for.

    The sentence says so if no event followed, or if nothing is known to have been waited for.
    """
    if group.why == DONE:
        return DONE
    instruction = f"{group.op} {shorten_name(group.line, _IN_SENTENCE)}"
    if group.why == FIRST_BYTE:
        return f"first bytes of {instruction}"
    if not group.cause_op:
        return f"{instruction}, {group.why}"
    purpose = f" for {shorten_name(group.tensor, _IN_SENTENCE)}" if group.tensor else ""
    cause = f"{group.cause_op} {shorten_name(group.cause_line, _IN_SENTENCE)} on {group.cause_track}"
    return f"{instruction} waited{purpose}: {group.why} {cause}"


def make_traffic_table(profile: Profile, rows: int) -> Table:
    """Return the table of the first `rows` tensors in HBM.

    The profile has them in descending order of moved bytes.
    """
    table_rows = [
        (
            tensor.name,
            _format_mb(tensor.nbytes),
            _format_mb(tensor.read_bytes),
            _format_ratio(tensor.reads),
            _format_mb(tensor.written_bytes),
            _format_ratio(tensor.writes),
        )
        for tensor in profile.traffic[:rows]
    ]
    return table("HBM tensor|MB|read MB|times|written MB|times", table_rows)


def _count_more_traffic(profile: Profile, rows: int) -> list[Part]:
    """Return a line with the number and the moved bytes of the tensors after the first `rows`.

    Empty if there are none.
    """
    omitted = profile.traffic[rows:]
    return (
        [f"{len(omitted)} more with {_format_mb(sum(tensor.moved_bytes for tensor in omitted))} MB"]
        if omitted
        else []
    )


def _format_mb(size: float) -> str:
    """Format bytes as megabytes, with three decimals."""
    return f"{size / 1e6:.3f}"


def _format_ratio(ratio: float) -> str:
    """Format a ratio with two decimals, one from 100, none from 1,000."""
    return f"{ratio:.{2 if ratio < 100 else 1 if ratio < 1000 else 0}f}"


def _make_line_tables(profile: Profile, rows: int) -> list[Part]:
    """Return the tables of time by line, and by calling line if call stacks are known."""
    out: list[Part] = [_make_line_table("line", profile.lines[:rows], profile.length_ns)]
    if profile.calling_lines:
        out += [
            "",
            _make_line_table("line with its callees", profile.calling_lines[:rows], profile.length_ns),
        ]
    return out


def _make_line_table(head: str, times: Sequence[LineTime], length: float) -> Noted:
    """Return a table of line times, with the source text of a line below its row.

    Args:
        head: Heading of the first column.
        length: Length of the launch in ns, of which `path_ns` is given as a share.
    """
    rows = [
        (
            Name(format_line(line_time.line)),
            str(line_time.events),
            format_us(line_time.held_ns),
            format_share(line_time.path_ns, length),
        )
        for line_time in times
    ]
    return Noted(
        table(f"{head}|events|held us|of length", rows),
        [read_source_line(line_time.line) for line_time in times],
    )


def _make_what_if_table(profile: Profile, rows: int) -> list[Part]:
    """Return the table of the first `rows` halved costs that shorten the launch.

    A line below names the costs without a kernel line that do not shorten it.
    """
    gains = [change for change in profile.what_if if change.length_ns < change.before_ns]
    table_rows = [
        (
            Name(change.line, f"{change.cost_name} ") if change.line else change.cost_name,
            format_us(change.length_ns),
            f"{-100 * change.gain:.1f} %",
        )
        for change in gains[:rows]
    ]
    out: list[Part] = [table("twice as fast|us|change", table_rows)]
    unchanged = [
        change for change in profile.what_if if change.length_ns >= change.before_ns and not change.line
    ]
    if unchanged:
        out.append(Hanging(f"no gain: {', '.join(change.cost_name for change in unchanged)}"))
    return out


def _format_count(number: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
