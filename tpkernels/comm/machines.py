"""Constants of the machines that were measured. The table is written by ``python -m bench fit-paths FILES --write``.

Results of suite ``overlap`` that it was fitted to: bench/results/. H100: no fused operation was measured there since
the kernels are as they are; those constants are of the H200, the others of the H100 itself.
"""

from __future__ import annotations

from tpkernels.comm.choice import Machine, Overlap, Quick


def find(card: str, world: int) -> Machine | None:
    """Of that many ranks, or of the nearest number that was measured; None for a card that was not."""
    known = [machine for machine in MACHINES if machine.card == card]
    return min(known, key=lambda machine: (abs(machine.world - world), machine.world), default=None)


# fmt: off
MACHINES = (
    Machine(
        "NVIDIA H100 80GB HBM3", 4, tflops=759.6, memory_gbps=2848.0, launch_us=3.155,
        apart={
            "all_gather_matmul": (
                (18874368, 83.72), (25165824, 108.82), (37748736, 144.37), (50331648, 192.46), (100663296, 344.3),
                (150994944, 505.49),
            ),
            "matmul_reduce_scatter": (
                (18874368, 136.8), (25165824, 173.67), (37748736, 242.76), (50331648, 339), (100663296, 644.67),
                (150994944, 952.91),
            ),
            "matmul_all_reduce": (
                (196608, 28.07), (393216, 37.33), (589824, 40.31), (786432, 38.28), (1572864, 46.93),
                (2359296, 55.01), (3145728, 57.76), (6291456, 88.76), (9437184, 105.19), (37748736, 228.85),
                (50331648, 285.94), (75497472, 391.21), (100663296, 533.46), (201326592, 994.94), (301989888, 1438.69),
            ),
        },
        fused={
            "all_gather_matmul": Overlap(305, 0.001, 34, 1.672),
            "matmul_reduce_scatter": Overlap(214.1, 0.5245, 10, 3.931),
            "matmul_all_reduce": Overlap(270.7, 0.5631, 75.41, 20.66),
        },
        quick=Quick(0, 1, 0),
    ),
    Machine(
        "NVIDIA H200", 2, tflops=761.9, memory_gbps=4269.0, launch_us=3.462,
        apart={
            "all_gather_matmul": (
                (12582912, 68.05), (16777216, 91.34), (25165824, 120.23), (33554432, 158.07), (67108864, 284.54),
                (100663296, 389.63),
            ),
            "matmul_reduce_scatter": (
                (12582912, 111.59), (16777216, 146.32), (25165824, 203.47), (33554432, 271.4), (67108864, 511.98),
                (100663296, 759.14),
            ),
            "matmul_all_reduce": (
                (131072, 17.85), (262144, 28.1), (393216, 29.98), (524288, 27.87), (1048576, 35.97),
                (1572864, 42.87), (2097152, 43.21), (4194304, 64.7), (6291456, 76.62), (25165824, 186.63),
                (33554432, 240.6), (50331648, 327.98), (67108864, 431.81), (134217728, 799.14), (201326592, 1167.49),
            ),
        },
        fused={
            "all_gather_matmul": Overlap(276.4, 0.001, 31.15, 0.001001),
            "matmul_reduce_scatter": Overlap(142.8, 0.5979, 10, 0.001),
            "matmul_all_reduce": Overlap(167.8, 0.4911, 50.59, 8.429),
        },
        quick=Quick(0, 1, 0),
    ),
    Machine(
        "NVIDIA H200", 4, tflops=766.1, memory_gbps=4292.0, launch_us=3.5,
        apart={
            "all_gather_matmul": (
                (18874368, 83.73), (25165824, 107.38), (37748736, 142.51), (50331648, 190.54), (100663296, 345.47),
                (150994944, 510.48),
            ),
            "matmul_reduce_scatter": (
                (18874368, 82.33), (25165824, 105.64), (37748736, 142.47), (50331648, 192.23), (100663296, 351.01),
                (150994944, 518.32),
            ),
            "matmul_all_reduce": (
                (196608, 12.04), (393216, 13.11), (589824, 14.01), (786432, 14.93), (1572864, 19.49),
                (2359296, 25.44), (3145728, 27.38), (6291456, 41.43), (9437184, 47.78), (37748736, 134.75),
                (50331648, 175.78), (75497472, 240.85), (100663296, 324.95), (201326592, 613.58), (301989888, 901.84),
            ),
        },
        fused={
            "all_gather_matmul": Overlap(305, 0.001, 34, 1.672),
            "matmul_reduce_scatter": Overlap(214.1, 0.5245, 10, 3.931),
            "matmul_all_reduce": Overlap(270.7, 0.5631, 75.41, 20.66),
        },
        quick=Quick(0, 1, 0),
    ),
)
