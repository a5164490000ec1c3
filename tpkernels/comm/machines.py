"""Constants of the machines that were measured. The table is written by ``python -m bench fit-paths FILES --write``.

Results of suite ``overlap`` that it was fitted to: bench/results/. H100: no fused operation was measured there since
the kernels are as they are; those constants are of the H200, the others of the H100 itself. Small gathers and
reduce-scatters were not measured anywhere yet: their constants (``quick``) are those of the small all-reduce.
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
            "all_gather_matmul": Overlap(318.6, 0.001, 34, 1.244),
            "matmul_reduce_scatter": Overlap(238.9, 0.001, 76.89, 0.001008),
            "matmul_all_reduce": Overlap(253.5, 0.3223, 99.13, 0.001),
        },
        quick={
            "all_gather_matmul": Quick(7.585, 290.5, 8388608),
            "matmul_reduce_scatter": Quick(7.585, 290.5, 16777216),
            "matmul_all_reduce": Quick(7.585, 290.5, 8388608),
        },
    ),
    Machine(
        "NVIDIA H200", 2, tflops=772.6, memory_gbps=4269.0, launch_us=3.5,
        apart={
            "all_gather_matmul": (
                (12582912, 71.36), (16777216, 93.26), (25165824, 126.18), (33554432, 160.03), (67108864, 290.36),
                (100663296, 432.06),
            ),
            "matmul_reduce_scatter": (
                (12582912, 114.21), (16777216, 148.16), (25165824, 208.84), (33554432, 273.28), (67108864, 517.61),
                (100663296, 782.42),
            ),
            "matmul_all_reduce": (
                (131072, 17.87), (262144, 28.11), (393216, 29.85), (524288, 27.84), (1048576, 35.9),
                (1572864, 43.02), (2097152, 43.39), (4194304, 64.73), (6291456, 77.39), (25165824, 189.62),
                (33554432, 242.81), (50331648, 333.48), (67108864, 433.61), (134217728, 804.7), (201326592, 1187.25),
            ),
        },
        fused={
            "all_gather_matmul": Overlap(267.5, 0.06043, 10, 0.001),
            "matmul_reduce_scatter": Overlap(571.4, 0.5979, 10, 0.001),
            "matmul_all_reduce": Overlap(318, 0.1949, 80.97, 0.001),
        },
        quick={
            "all_gather_matmul": Quick(4.978, 250.6, 8388608),
            "matmul_reduce_scatter": Quick(4.978, 250.6, 16777216),
            "matmul_all_reduce": Quick(4.978, 250.6, 8388608),
        },
    ),
    Machine(
        "NVIDIA H200", 4, tflops=772.6, memory_gbps=4245.0, launch_us=3.778,
        apart={
            "all_gather_matmul": (
                (1572864, 21.32), (3145728, 38.09), (6291456, 46.32), (18874368, 84.35), (25165824, 108.1),
                (37748736, 144.58), (50331648, 190.76), (100663296, 352.41), (150994944, 527.17),
            ),
            "matmul_reduce_scatter": (
                (1572864, 17.86), (3145728, 35.3), (6291456, 41.12), (18874368, 134.86), (25165824, 106.27),
                (37748736, 236.41), (50331648, 193.13), (100663296, 473.7), (150994944, 529.36),
            ),
            "matmul_all_reduce": (
                (196608, 27.66), (393216, 36.96), (589824, 40.52), (786432, 38.17), (1572864, 46.27),
                (2359296, 55.92), (3145728, 57.68), (6291456, 84.53), (9437184, 95.07), (37748736, 224.2),
                (50331648, 281), (75497472, 378.19), (100663296, 505.88), (201326592, 940.4), (301989888, 1367.73),
            ),
        },
        fused={
            "all_gather_matmul": Overlap(318.6, 0.001, 34, 1.244),
            "matmul_reduce_scatter": Overlap(238.9, 0.001, 76.89, 0.001008),
            "matmul_all_reduce": Overlap(253.5, 0.3223, 99.13, 0.001),
        },
        quick={
            "all_gather_matmul": Quick(7.585, 290.5, 8388608),
            "matmul_reduce_scatter": Quick(7.585, 290.5, 16777216),
            "matmul_all_reduce": Quick(7.585, 290.5, 8388608),
        },
    ),
)
