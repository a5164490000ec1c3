"""Constants of the machines that were measured. The table is written by ``python -m bench fit-paths FILES --write``.

Results of suite ``overlap`` that it was fitted to: bench/results/. H100: no fused operation was measured there since
the kernels are as they are; those constants are of the H200, the others of the H100 itself. Small gathers and
reduce-scatters (``quick``) are of four H200; two have the constants of their small all-reduce.
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
            "all_gather_matmul": Overlap(318.6, 0.001, 34.94, 0.9996),
            "matmul_reduce_scatter": Overlap(260.7, 0.2411, 25.61, 2.288),
            "matmul_all_reduce": Overlap(289.8, 0.2479, 76.24, 4.934),
        },
        quick={
            "all_gather_matmul": Quick(6.028, 311.9, 8388608),
            "matmul_reduce_scatter": Quick(5.913, 290.5, 16777216),
            "matmul_all_reduce": Quick(7.71, 301.8, 8388608),
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
            "all_gather_matmul": Overlap(282.5, 0.1217, 10, 0.1948),
            "matmul_reduce_scatter": Overlap(585.5, 0.5979, 10, 1.727),
            "matmul_all_reduce": Overlap(301.1, 0.2426, 11.56, 14.18),
        },
        quick={
            "all_gather_matmul": Quick(4.978, 250.6, 8388608),
            "matmul_reduce_scatter": Quick(4.978, 250.6, 16777216),
            "matmul_all_reduce": Quick(5.048, 249.2, 8388608),
        },
    ),
    Machine(
        "NVIDIA H200", 4, tflops=751.8, memory_gbps=4130.0, launch_us=3.676,
        apart={
            "all_gather_matmul": (
                (786432, 15.42), (1572864, 22.29), (3145728, 37.71), (6291456, 45.63), (12582912, 68.96),
                (18874368, 83.19), (25165824, 107.25), (37748736, 143.94), (50331648, 189.71), (100663296, 345.63),
                (150994944, 517.58),
            ),
            "matmul_reduce_scatter": (
                (786432, 13.1), (1572864, 18.73), (3145728, 34.02), (6291456, 39.1), (12582912, 58.38),
                (18874368, 81.74), (25165824, 105.46), (37748736, 141.89), (50331648, 191.61), (100663296, 352.84),
                (150994944, 517.84),
            ),
            "matmul_all_reduce": (
                (196608, 11.78), (393216, 12.83), (589824, 13.89), (786432, 15.03), (1572864, 19.31),
                (2359296, 24.86), (3145728, 27.79), (6291456, 41.43), (9437184, 47.69), (37748736, 134.21),
                (50331648, 174.69), (75497472, 239.59), (100663296, 323.85), (201326592, 613.88), (301989888, 903.16),
            ),
        },
        fused={
            "all_gather_matmul": Overlap(318.6, 0.001, 34.94, 0.9996),
            "matmul_reduce_scatter": Overlap(260.7, 0.2411, 25.61, 2.288),
            "matmul_all_reduce": Overlap(289.8, 0.2479, 76.24, 4.934),
        },
        quick={
            "all_gather_matmul": Quick(6.028, 311.9, 8388608),
            "matmul_reduce_scatter": Quick(5.913, 290.5, 16777216),
            "matmul_all_reduce": Quick(7.71, 301.8, 8388608),
        },
    ),
)
