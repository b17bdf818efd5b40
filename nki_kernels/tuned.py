"""Values of parameters that were found to be faster than the defaults, by kernel, generation and bucket of launches.

`nkw tune --write` puts an entry here, and `tuning.choose_parameters` reads it. A key is "<kernel> <generation>
<bucket>"; the bucket is the name of similar launches that `<kernel>_bucket` returns. `arguments` are those
the values were found with, as the command line names them.
"""

from __future__ import annotations

TUNED = {
    "matmul gen2 bfloat16 1024x1024x1024": {
        "arguments": "bf16[1024,1024] bf16[1024,1024]",
        "values": {
            "resident_bytes": 65536,
            "moving_bytes": 32768,
            "lead_tiles": 7,
            "lead_elements": 512,
            "part_elements": 4096,
            "group_tiles": 1,
            "eviction": "scalar",
            "transposes": "dma",
        },
    },
    "matmul gen3 bfloat16 1024x1024x1024": {
        "arguments": "bf16[1024,1024] bf16[1024,1024]",
        "values": {
            "resident_bytes": 65536,
            "moving_bytes": 16384,
            "lead_tiles": 1,
            "lead_elements": 512,
            "part_elements": 4096,
            "group_tiles": 2,
            "eviction": "vector",
            "transposes": "dma",
        },
    },
    "matmul gen3 bfloat16 128x4096x4096": {
        "arguments": "bf16[128,4096] bf16[4096,4096]",
        "values": {
            "resident_bytes": 131072,
            "moving_bytes": 8192,
            "lead_tiles": 4,
            "lead_elements": 4096,
            "part_elements": 1024,
            "group_tiles": 2,
            "eviction": "scalar",
            "transposes": "dma",
        },
    },
    "matmul gen3 float32 1024x1024x1024": {
        "arguments": "f32[1024,1024] f32[1024,1024]",
        "values": {
            "resident_bytes": 32768,
            "moving_bytes": 32768,
            "lead_tiles": 1,
            "lead_elements": 1024,
            "part_elements": 2048,
            "group_tiles": 1,
            "eviction": "both",
            "transposes": "dma",
        },
    },
}
