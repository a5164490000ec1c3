// Schemas of every tpkernels op: the one place. Fakes, autograd and the distributed implementations are
// in Python (tpkernels/ops/), because the stable ABI has neither SymInt nor process groups.
//
// An op never returns an alias of an argument: ops that write into an argument return nothing. Ops with a
// gradient have no default arguments: torch 2.11 strips trailing arguments that equal their defaults, and its
// Python autograd then expects as many gradients fewer.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(tpkernels, m) {
  // Local products.
  m.def(
      "matmul(Tensor a, Tensor b, Tensor? bias, str activation, ScalarType? out_dtype, "
      "bool return_preact, str path) -> Tensor[]");
  m.def("matmul_accumulate(Tensor a, Tensor b, Tensor(c!) acc, str path) -> ()");

  // Products fused with a collective over the process group named group_name. biases[i] belongs to
  // bs[bias_of[i]] (autograd cannot differentiate Tensor?[]).
  m.def(
      "all_gather_matmul(Tensor a_shard, Tensor[] bs, Tensor[] biases, int[] bias_of, str activation, "
      "int gather_dim, SymInt[]? shard_sizes, str group_name, ScalarType? out_dtype, bool return_preact, "
      "bool return_gathered, bool save_gathered, str path) -> Tensor[]");
  m.def(
      "matmul_replicated(Tensor a, Tensor[] bs, Tensor[] biases, int[] bias_of, str activation, "
      "str group_name, ScalarType? out_dtype, bool return_preact, str path) -> Tensor[]");
  m.def(
      "matmul_reduce_scatter(Tensor[] a, Tensor[] b, Tensor? bias, Tensor? residual, int scatter_dim, "
      "SymInt[]? shard_sizes, str group_name, ScalarType? out_dtype, str path) -> Tensor");
  m.def(
      "matmul_all_reduce(Tensor[] a, Tensor[] b, Tensor? bias, Tensor? residual, str group_name, "
      "ScalarType? out_dtype, str path) -> Tensor");

  // Collectives with gradients, for layers.
  m.def("copy_to_group(Tensor x, str group_name) -> Tensor");
  m.def("all_reduce(Tensor x, str reduce_op, str group_name) -> Tensor");
  m.def(
      "all_gather(Tensor x, int dim, SymInt[]? shard_sizes, str group_name, "
      "bool replicated_grad) -> Tensor");
  m.def("reduce_scatter(Tensor x, int dim, SymInt[]? shard_sizes, str group_name) -> Tensor");
  m.def("split(Tensor x, int dim, SymInt[]? shard_sizes, str group_name) -> Tensor");

  // The Stream-K kernel, below every path named "streamk": CPU executor in _C, CUDA kernel in _C_sm80.
  // a [B, M, K], b [B, K, N], bias [N], out and preact [B, M, N], any strides. schedule is a name of
  // host/schedule_builder.hpp or 'auto'; workers = 0 means as many as run at once; tile is the name of one of
  // the device's tiles ("128x128x32" is BM x BN x BK), '' leaves the choice to the cost model.
  m.def(
      "streamk_gemm(Tensor a, Tensor b, Tensor? bias, Tensor(o!) out, Tensor(p!)? preact, str activation, "
      "bool accumulate, str schedule='auto', int workers=0, int splits=1, str tile='') -> ()");
  // What streamk_gemm would do, without doing it; device is "cpu", "sm80" or "sm90" ("cuda" is sm90),
  // multiprocessors = 0 means 108 and 132:
  // (schedule name, [bm, bn, bk, tiles, k_iters, workers, splits, partial tiles], predicted us).
  m.def(
      "streamk_plan(int batch, int m, int n, int k, str device, str schedule='auto', int workers=0, "
      "int splits=1, int multiprocessors=0, str tile='') -> (str, int[], float)");
  m.def("build_info() -> str");
}
