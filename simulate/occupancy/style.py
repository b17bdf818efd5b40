"""Style sheet of memory maps and bar charts, and the twelve colours of allocations, for light and dark pages."""

from __future__ import annotations

COLOURS = (
    "#5b8db8",
    "#d59a4c",
    "#6aa574",
    "#b0739b",
    "#8a8ec7",
    "#c77f6d",
    "#4fa3a0",
    "#a8a24e",
    "#7a94a6",
    "#c58fb5",
    "#88b06b",
    "#b39376",
)

STYLE = """
.nkw-memory.map { min-width: 720px; }
.nkw-memory { max-width: 100%; height: auto;
  --page: #fdfcfa; --field: #f3f1ec; --grid: #dcd8cf; --ink: #2e2c28; --soft: #7a766c;
  --limit: #b3432f; --loop: #cfcabd; --odd: #b4ae9f;
  font-family: ui-sans-serif, system-ui, -apple-system, "Segoe UI", sans-serif; font-size: 12px; }
@media (prefers-color-scheme: dark) { .nkw-memory { --page: #1b1c1e; --field: #242629; --grid: #373a3f;
  --ink: #e4e2dc; --soft: #9a978f; --limit: #e07a64; --loop: #4a4d52; --odd: #5d6067; } }
.nkw-memory .page { fill: var(--page); }
.nkw-memory .field { fill: var(--field); }
.nkw-memory .grid { stroke: var(--grid); stroke-width: 1; }
.nkw-memory .limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 6 3; }
.nkw-memory .high { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
.nkw-memory .live { fill: none; stroke: var(--ink); stroke-width: 1.25; stroke-linejoin: round; }
.nkw-memory .tile { stroke: var(--page); stroke-width: 0.5; }
.nkw-memory .tile:hover { stroke: var(--ink); stroke-width: 1.5; }
.nkw-memory .loop { fill: var(--loop); }
.nkw-memory .loop.odd { fill: var(--odd); }
.nkw-memory text { fill: var(--ink); }
.nkw-memory .title { font-size: 18px; font-weight: 600; }
.nkw-memory .head { font-size: 14px; font-weight: 600; }
.nkw-memory .note, .nkw-memory .axis { fill: var(--soft); }
.nkw-memory .axis { font-size: 11px; }
.nkw-memory .ink { fill: var(--ink); }
.nkw-memory .end { text-anchor: end; }
.nkw-memory .row { font-size: 12px; }
.nkw-memory .mark { fill: #17181a; font-size: 10px; font-weight: 600; text-anchor: middle; pointer-events: none; }
"""
