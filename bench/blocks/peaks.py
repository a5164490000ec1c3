"""Matrix peaks of GPUs by their data sheets."""

from __future__ import annotations

__all__ = ["data_sheet_tflops"]

# 10^12 floating-point operations a second in bfloat16 and float16 without sparsity; the first name that is part
# of the device's counts. NVIDIA's data sheets of the products.
_DENSE_16_BIT = (
    ("B300", 2500.0),
    ("B200", 2250.0),
    ("GB200", 2500.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 PCIe", 756.5),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.05),
    ("A40", 149.7),
    ("A10", 125.0),
    ("V100", 125.0),
)


def data_sheet_tflops(device_name: str, dtype: str) -> float:
    """Peak of a device as torch names it; 0 where it is not known."""
    if dtype not in ("bfloat16", "float16"):
        return 0.0
    return next((peak for name, peak in _DENSE_16_BIT if name in device_name), 0.0)
