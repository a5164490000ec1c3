// Schemas of every tpkernels op: the one place. Fakes, autograd and the distributed implementations are
// in Python (tpkernels/ops/), because the stable ABI has neither SymInt nor process groups.
//
// An op never returns an alias of an argument: ops that write into an argument return nothing. Ops with a
// gradient have no default arguments: torch 2.11 strips trailing arguments that equal their defaults, and
// their kernel for the key Autograd (tpkernels/ops/_autograd.py) wants all of them.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(tpkernels, m) {
  // Local products. matmul returns [out], or what the backward pass wants too: [out, preact], and with a gate
  // [out, alpha a b, alpha a gate].
  m.def(
      "matmul(Tensor a, Tensor b, Tensor? gate, Tensor? bias, Tensor? residual, float alpha, "
      "str activation, ScalarType? out_dtype, bool return_preact, str path) -> Tensor[]");
  m.def("matmul_accumulate(Tensor a, Tensor b, Tensor(c!) acc, str path) -> ()");
  // group_sizes[g] rows of a by b[g], and the gradient of b, or the sum with it: a_g^T dy_g [groups, K, N],
  // transposed: stored [groups, N, K]. grouped_matmul returns as matmul does; the last three arguments are
  // those of the fused products below, for b and then the gate.
  m.def(
      "grouped_matmul(Tensor a, Tensor b, Tensor? gate, Tensor? bias, SymInt[] group_sizes, str activation, "
      "ScalarType? out_dtype, bool return_preact, str path, Tensor[]? main_grads, int[]? main_grad_of, "
      "bool[]? stand_ins) -> Tensor[]");
  m.def(
      "grouped_weight_grad(Tensor a, Tensor dy, SymInt[] group_sizes, bool transposed, str path) -> Tensor");
  m.def(
      "grouped_weight_grad_accumulate(Tensor a, Tensor dy, Tensor(c!) acc, SymInt[] group_sizes, "
      "str path) -> ()");

  // Products fused with a collective over the process group named group_name. biases[i] belongs to
  // bs[bias_of[i]] (autograd cannot differentiate Tensor?[]). main_grads[i], stored as the parameter is whose
  // .mT is bs[main_grad_of[i]]: the backward pass adds the gradient of that weight to it, and the weight gets
  // none, or zeros where stand_ins[i]. The op itself does not touch it, so it is not an argument that is
  // written to (tpkernels/ops/_main_grad.py).
  m.def(
      "all_gather_matmul(Tensor a_shard, Tensor[] bs, Tensor[] biases, int[] bias_of, str activation, "
      "int gather_dim, SymInt[]? shard_sizes, str group_name, ScalarType? out_dtype, bool return_preact, "
      "bool return_gathered, bool save_gathered, str path, Tensor[]? main_grads, int[]? main_grad_of, "
      "bool[]? stand_ins) -> Tensor[]");
  m.def(
      "matmul_replicated(Tensor a, Tensor[] bs, Tensor[] biases, int[] bias_of, str activation, "
      "str group_name, ScalarType? out_dtype, bool return_preact, str path, Tensor[]? main_grads, "
      "int[]? main_grad_of, bool[]? stand_ins) -> Tensor[]");
  m.def(
      "matmul_reduce_scatter(Tensor[] a, Tensor[] b, Tensor? bias, Tensor? residual, int scatter_dim, "
      "SymInt[]? shard_sizes, str group_name, ScalarType? out_dtype, str path, Tensor[]? main_grads, "
      "int[]? main_grad_of, bool[]? stand_ins) -> Tensor");
  m.def(
      "matmul_all_reduce(Tensor[] a, Tensor[] b, Tensor? bias, Tensor? residual, str group_name, "
      "ScalarType? out_dtype, str path, Tensor[]? main_grads, int[]? main_grad_of, bool[]? stand_ins) -> "
      "Tensor");

  // Products of FP8 operands with the float32 scales that they were divided by (tpkernels/fp8/_quantize.py),
  // and the three with a collective: what is gathered travels in FP8, sums travel in out_dtype. a [..., K], b
  // [K, N]; scale_a of one element, [..., 1] or [..., ceil(K / 128)]; scale_b of one, [1, N], [ceil(K / 128),
  // N] or [ceil(K / 128), ceil(N / 128)]. fast_accumulation: sums are not promoted to float32 every 128 of K.
  // No gradients. all_gather_scaled_matmul returns the products, then, if asked for, what was gathered: data,
  // scale.
  m.def(
      "scaled_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
      "bool fast_accumulation, str path) -> Tensor");
  m.def(
      "all_gather_scaled_matmul(Tensor a_shard, Tensor scale_a, Tensor[] bs, Tensor[] scale_bs, "
      "Tensor[] biases, int[] bias_of, int gather_dim, SymInt[]? shard_sizes, str group_name, "
      "ScalarType out_dtype, bool fast_accumulation, bool return_gathered, str path) -> Tensor[]");
  m.def(
      "scaled_matmul_reduce_scatter(Tensor[] a, Tensor[] b, Tensor[] scale_a, Tensor[] scale_b, Tensor? "
      "bias, "
      "Tensor? residual, int scatter_dim, SymInt[]? shard_sizes, str group_name, ScalarType out_dtype, "
      "bool fast_accumulation, str path) -> Tensor");
  m.def(
      "scaled_matmul_all_reduce(Tensor[] a, Tensor[] b, Tensor[] scale_a, Tensor[] scale_b, Tensor? bias, "
      "Tensor? residual, str group_name, ScalarType out_dtype, bool fast_accumulation, str path) -> Tensor");

  // Gradients of the two, those that are wanted in the order of the arguments: products with what is gathered
  // read it where it came to.
  m.def(
      "all_gather_matmul_grads(Tensor[] dys, Tensor a_shard, Tensor[] bs, bool[] need_bs, int gather_dim, "
      "SymInt[]? shard_sizes, str group_name, str path) -> Tensor[]");
  m.def(
      "matmul_reduce_scatter_grads(Tensor dy, Tensor[] a, Tensor[] b, bool[] need_a, bool[] need_b, "
      "bool need_bias, int scatter_dim, SymInt[]? shard_sizes, str group_name, str path) -> Tensor[]");
  // Of the first, where gradients of weights are added to: that of bs[into_of[i]] to into[i], [K, N]. Returns
  // that of a_shard alone: functionalisation takes no op that writes and returns a list.
  m.def(
      "all_gather_matmul_grads_into(Tensor[] dys, Tensor a_shard, Tensor[] bs, Tensor(m!)[] into, "
      "int[] into_of, int gather_dim, SymInt[]? shard_sizes, str group_name, str path) -> Tensor");

  // Collectives with gradients, for layers.
  m.def("copy_to_group(Tensor x, str group_name) -> Tensor");
  m.def("all_reduce(Tensor x, str reduce_op, str group_name) -> Tensor");
  m.def(
      "all_gather(Tensor x, int dim, SymInt[]? shard_sizes, str group_name, "
      "bool replicated_grad) -> Tensor");
  m.def("reduce_scatter(Tensor x, int dim, SymInt[]? shard_sizes, str group_name) -> Tensor");
  m.def("split(Tensor x, int dim, SymInt[]? shard_sizes, str group_name) -> Tensor");

  // out = pieces[0] + pieces[1] + ... + bias + residual, in this order in fp32 (fp64 for fp64), rounded once;
  // in _C_sm80. pieces [ranks, ...]; own is taken instead of pieces[rank], if given; own, out and residual
  // have a piece's elements and pieces' dtype; element i gets bias[(first_column + i) % N]. All contiguous,
  // and out apart from the others.
  m.def(
      "sum_ranks(Tensor pieces, Tensor? own, int rank, Tensor? bias, Tensor? residual, Tensor(o!) out, int "
      "first_column=0) -> ()");

  // tpk.quantize (tpkernels/fp8/_quantize.py says what it computes): [data, scale] of x [rows, K] unless
  // plain is False, then, if turned, [data, scale] of x^T. amax, of one element: taken instead of x's.
  // requantize_transposed: [data, scale] of the transposed of what is quantised already.
  m.def(
      "quantize(Tensor x, str scaling, ScalarType dtype, bool power_of_2, bool plain, bool turned, "
      "Tensor? amax) -> Tensor[]");
  m.def("requantize_transposed(Tensor data, Tensor scale, str scaling, bool power_of_2) -> Tensor[]");
  // Of each of xs the largest absolute value, float32 [len(xs)]; inf where one is not finite.
  m.def("largest(Tensor[] xs) -> Tensor");
  // What the three run on CUDA, in _C_sm80. x [rows, columns], columns contiguous; plain [rows, columns] and
  // turned [columns, rows], each with its scales, contiguous. scaling is one of tpk.quantize's; tensorwise,
  // amax is the largest absolute value of x. x in FP8 stands for x * x_scale ([rows, 1] or [rows,
  // ceil(columns / 128)]), or without x_scale for its bytes, and only turned is made.
  m.def(
      "quantize_fp8(Tensor x, Tensor? x_scale, Tensor? amax, Tensor(a!)? plain, Tensor(b!)? plain_scale, "
      "Tensor(c!)? turned, Tensor(d!)? turned_scale, str scaling, bool power_of_2) -> ()");
  // amax (float32, one element) = largest absolute value of x [rows, columns], columns contiguous.
  m.def("find_largest(Tensor x, Tensor(a!) amax) -> ()");

  // The Stream-K kernels, below every path named "streamk": CPU executor in _C, the portable CUDA kernel in
  // _C_sm80, the Hopper kernel in _C_sm90a. What is computed, and in which order: kernels/gemm_call.hpp.
  // a [B, M, K], b and gate [B, K, N], bias [N], out, preact and residual [B, M, N], any strides. residual
  // may be out itself (the same view), else it shares no memory with it. schedule is a name of
  // host/schedule_builder.hpp or 'auto'; workers = 0 means as many as run at once; tile is the name of one of
  // the device's tiles ("128x128x32" is BM x BN x BK, "128x256x64/2x1" names a cluster too), '' leaves the
  // choice to the cost model. multiprocessors = 0 means all; on the CPU it bounds the threads. allow_tf32:
  // factors of float32 may be rounded to TF32, which CUDA does then.
  m.def(
      "streamk_gemm(Tensor a, Tensor b, Tensor? bias, Tensor(o!) out, Tensor(p!)? preact, str activation, "
      "bool accumulate, str schedule='auto', int workers=0, int splits=1, str tile='', Tensor? gate=None, "
      "Tensor? residual=None, float alpha=1.0, int multiprocessors=0, bool allow_tf32=False) -> ()");
  // Rows of a [rows, K] in groups, group_sizes[g] of them multiplied by b[g] [K, N]: gate as b, out and
  // preact [rows, N], bias [groups, N], any strides; otherwise as above. One launch of the Hopper kernel for
  // up to 64 groups that have rows; elsewhere, and where it cannot load an operand, a product for each.
  m.def(
      "streamk_gemm_grouped(Tensor a, Tensor b, Tensor? bias, Tensor(o!) out, Tensor(p!)? preact, "
      "str activation, int[] group_sizes, str schedule='auto', int workers=0, int splits=1, str tile='', "
      "int multiprocessors=0, Tensor? gate=None, bool allow_tf32=False) -> ()");
  // out = (sum over k of a * scale_a * b * scale_b) + bias, by the Hopper kernel, in _C_sm90a. a [M, K], b
  // [K, N]: float8_e4m3fn or float8_e5m2 each, K contiguous in both, rows multiples of 16 bytes apart. Scales
  // are float32, of any strides: scale_a of one element, [M, 1] or [M, ceil(K / 128)], scale_b of one, [1,
  // N], [ceil(K / 128), N] or [ceil(K / 128), ceil(N / 128)]. bias [N]; out [M, N], bfloat16, float16 or
  // float32. fast_accumulation leaves sums in the tensor cores' accumulators of some 14 bits; else they are
  // promoted to float32 every 128 of K. The rest as above; tiles are 128x256x128 and 128x128x128.
  m.def(
      "scaled_gemm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor(o!) out, "
      "bool fast_accumulation, str schedule='auto', int workers=0, int splits=1, str tile='', "
      "int multiprocessors=0) -> ()");
  // A plain product tied to flags, in _C_sm90a: what the fused operations are made of. Rows of a that
  // arrive in blocks (arrival_rows: their ends; slab_k: in slabs of K too) are not read before their flag has
  // reached the epoch; blocks of out's rows (bell_rows) set their bell to 1 when they are in memory. Words
  // are int32. See kernels/gemm_hooks.hpp. more_a and more_b: up to three more pairs of factors, whose
  // products are added; the same dimension is contiguous in all left ones, and in all right ones.
  m.def(
      "streamk_gemm_hooked(Tensor a, Tensor b, Tensor(o!) out, str schedule, int workers, int splits, str "
      "tile, "
      "Tensor? arrival_flags, Tensor? arrival_epoch, int[] arrival_rows, int slab_k, Tensor(c!)? counters, "
      "Tensor(d!)? bells, int[] bell_rows, float timeout_s, Tensor[]? more_a=None, Tensor[]? more_b=None) -> "
      "()");
  // One rank's part of a product that is fused with its collective, in _C_sm90a. addresses: of every rank's
  // symmetric memory, a page of words and a buffer (host/protocol.hpp), for a gather of [M, K rounded up to
  // 8], which has all rows behind the call if it is to be whole, else those of others; for a reduce-scatter
  // of a slot [most rows of a shard, N'] for each rank, where N' is N rounded up to 16 bytes. a_shard [own
  // rows, K], K contiguous; outs and preacts [M, N_i], gathered [M, K]; out and residual [own rows, N'], send
  // (scratch) [M, N'], all three contiguous and of one dtype; without send the product stores its tiles in
  // other ranks' memory itself, which all ranks have to do alike. more_a and more_b: as above. Waits for
  // ranks end after timeout_s: the launch fails, and comm_fault says why.
  m.def(
      "fused_all_gather_matmul(Tensor a_shard, Tensor[] bs, Tensor[] biases, int[] bias_of, str activation, "
      "Tensor(o!)[] outs, Tensor(p!)[] preacts, Tensor(g!)? gathered, int[] shard_rows, int rank, "
      "int[] addresses, float timeout_s, str schedule, str tile, int multiprocessors, bool whole=False) -> "
      "()");
  m.def(
      "fused_matmul_reduce_scatter(Tensor a, Tensor b, Tensor? bias, Tensor? residual, Tensor(o!) out, "
      "Tensor(s!)? send, int[] shard_rows, int rank, int[] addresses, float timeout_s, str schedule, str "
      "tile, "
      "int multiprocessors, Tensor[]? more_a=None, Tensor[]? more_b=None) -> ()");
  // As above, but every rank gets all rows: out [M, N], contiguous; the memory also has room for [M, N
  // rounded up to 16 bytes] behind the slots.
  m.def(
      "fused_matmul_all_reduce(Tensor a, Tensor b, Tensor? bias, Tensor? residual, Tensor(o!) out, "
      "Tensor(s!)? send, int[] shard_rows, int rank, int[] addresses, float timeout_s, str schedule, str "
      "tile, "
      "int multiprocessors, Tensor[]? more_a=None, Tensor[]? more_b=None) -> ()");
  // One rank's block of a product whose factors lie in blocks on all ranks: out [M, N] = sum over steps of a
  // left block [M, K] times a right block [K, N], plus bias [N]. left_from and right_from, [ranks, steps]:
  // whose blocks every rank takes at each step; own ones are left and right, stored [M, K] and [N, K], or,
  // where they sum rows, [K, M] and [K, N], on every rank alike, columns contiguous. The memory of addresses
  // has, behind its page, room for the most left blocks that a rank is sent, then for right ones; each has
  // its rows at multiples of 16 bytes, and all of it of 256. See ops/block_pushes.hpp.
  m.def(
      "fused_block_matmul(Tensor left, Tensor right, bool left_sums_rows, bool right_sums_rows, "
      "int[] left_from, int[] right_from, Tensor? bias, Tensor(o!) out, int rank, int[] addresses, "
      "float timeout_s, str schedule, str tile, int multiprocessors) -> ()");
  // The sum over ranks of partial [M, N], plus bias [N] and residual [M, N], in one kernel, for small sizes;
  // all contiguous, and partial, residual and out of one dtype. way: "packets", "one-shot" or "two-shot".
  // addresses: of every rank's symmetric memory of buffer_bytes (host/all_reduce.hpp), all of it zero at
  // first. ctas = 0 leaves the size of the launch to the op; with way and buffer_bytes it is the same on all
  // ranks.
  m.def(
      "fused_all_reduce(Tensor partial, Tensor? bias, Tensor? residual, Tensor(o!) out, str way, int rank, "
      "int[] addresses, int buffer_bytes, float timeout_s, int ctas=0) -> ()");
  // The same memory, and calls of all three may take turns: shard [own rows, K] of every rank, one below the
  // other, to out; and the own rows of the sum over ranks of partial [M, N], plus bias and residual [own
  // rows, N]. All contiguous; shard_rows, of every rank, may be 0.
  m.def(
      "fused_all_gather(Tensor shard, Tensor(o!) out, int[] shard_rows, int rank, int[] addresses, "
      "int buffer_bytes, float timeout_s, int ctas=0) -> ()");
  m.def(
      "fused_reduce_scatter(Tensor partial, Tensor? bias, Tensor? residual, Tensor(o!) out, int[] "
      "shard_rows, "
      "int rank, int[] addresses, int buffer_bytes, float timeout_s, int ctas=0) -> ()");
  // A gather of rows of 16-bit elements beneath what is called between the two, in the memory of
  // fused_all_gather_matmul: it needs no multiprocessor. Behind the second the own buffer has all rows.
  m.def(
      "fused_gather_begin(Tensor a_shard, int[] shard_rows, int rank, int[] addresses, float timeout_s) -> "
      "()");
  m.def(
      "fused_gather_end(Tensor a_shard, int[] shard_rows, int rank, int[] addresses, float timeout_s) -> "
      "()");
  // Before the first call on new symmetric memory, when every rank has mapped it.
  m.def("fused_warm_up(int device, int rank, int[] addresses) -> ()");
  m.def("comm_fault() -> str");
  // How _C_sm80 learns of the Hopper kernel: the address of a GemmEntry (kernels/gemm_call.hpp), 0 for none.
  m.def("sm90a_entry() -> int");
  m.def("attach_sm90a(int entry) -> ()");
  // Another way to peers than the copy engine, for path "fused": transport is the address of a Transport
  // (comm/transport.hpp), such as that of _C_nvshmem, 0 for none. nvshmem_map: an allocation of this size on
  // every rank, where each is mapped here, and which PE has it. nvshmem_versions: compiled with, then loaded.
  m.def("attach_transport(int transport) -> ()");
  m.def("nvshmem_transport() -> int");
  m.def("nvshmem_map(int[] addresses, int[] pes, int rank, int bytes) -> ()");
  m.def("nvshmem_versions() -> int[]");
  // What streamk_gemm would do, without doing it; device is "cpu", "sm80", "sm90" (the Hopper kernel; "cuda"
  // is the same), "sm90-portable", or, for what scaled_gemm would do, "sm90-fp8", "sm90-fp8-fast" or
  // "sm90-fp8-blocks" (scales of blocks along K); multiprocessors = 0 means 108 and 132: (schedule name, [bm,
  // bn, bk, tiles, k_iters, workers, splits, partial tiles, cluster m, cluster n, cluster k, 1 or 2 where
  // a CTA takes one whole tile, swapped or not], predicted us). bm and bn are of a CTA; tiles, k_iters,
  // workers and partial tiles count clusters. gated: there is a gate, for which the Hopper kernel takes half
  // of the columns of each tile, and the others a second product with the same plan. finishes: there is a
  // bias, residual, preact or activation, or an output of 2 bytes is added to; outer_major: K is contiguous
  // in neither operand. The Hopper kernel alone counts the time that these take. group_sizes, if there are
  // any: of streamk_gemm_grouped, whose sum is m. Where it makes several launches: the plan of the longest,
  // with tiles, partial tiles and time of all. dtype: of the operands of the other devices, "bfloat16",
  // "float16", "float32", "tf32" (float32 with allow_tf32) or "float64"; "cuda" is the kernel that the dtype
  // gets on Hopper. The CPU's plans are the same for all. collective: of a rank's part of
  // fused_all_gather_matmul, fused_matmul_reduce_scatter or fused_matmul_all_reduce (named without fused_),
  // as rows of every rank, shard_rows, come or go. Other kernels know no ranks. out_bytes: of an element of
  // the result. biased: all that finishes is a bias, which whole tiles of the Hopper kernel add on the way.
  // stored: the fused op is given no send.
  m.def(
      "streamk_plan(int batch, int m, int n, int k, str device, str schedule='auto', int workers=0, "
      "int splits=1, int multiprocessors=0, str tile='', bool gated=False, bool finishes=False, "
      "bool outer_major=False, int[] group_sizes=[], str dtype='bfloat16', str collective='', "
      "int[] shard_rows=[], int rank=0, int out_bytes=2, bool biased=False, bool stored=False) -> (str, "
      "int[], float)");
  // Tiles of the Hopper kernel whose CTAs take whole ones, as many as streamk_plan looks at: names, cheapest
  // first.
  m.def(
      "streamk_whole_tiles(int batch, int m, int n, int k, int multiprocessors=0, bool gated=False, "
      "int out_bytes=2) -> str[]");
  // Constants of the cost models that plans are made with, as text: host/cost_text.hpp. device: "cpu",
  // "sm90", or of the portable kernel "sm80" or "sm90-portable". set_plan_cost with "": those that the
  // library came with. sm90a_set_cost and sm80_set_cost are the same for launches of _C_sm90a and _C_sm80,
  // which have copies of their own.
  m.def("plan_cost(str device) -> str");
  m.def("set_plan_cost(str device, str text) -> ()");
  m.def("sm90a_set_cost(str text) -> ()");
  m.def("sm80_set_cost(str device, str text) -> ()");
  m.def("build_info() -> str");
}
