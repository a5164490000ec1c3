// The arguments of streamk_gemm, checked; the CPU and the CUDA op differ in their types of device and element
// only.
#pragma once

#include <optional>

#include "host/problem.hpp"
#include "ops/arguments.hpp"

namespace tpk::ops {

struct GemmRules {
  using ScalarType = torch::headeronly::ScalarType;

  const char* op;      // how sentences begin
  const char* device;  // "CUDA"
  int32_t device_type;
  bool (*is_operand)(ScalarType);  // for a, b and gate
  bool (*is_once)(ScalarType);     // for what is touched once per tile: bias, residual, out, preact
  const char* operands;            // in words
  const char* once;
};

// The tensors as views; which do not exist were not given.
struct GemmArguments {
  View a;
  View b;
  View bias;
  View out;
  View preact;
  View gate;
  View residual;
  Problem problem;
};

namespace detail {

inline void check_device(const GemmRules& rules, const View& t, const View& a) {
  TPK_REQUIRE(t.device_type == rules.device_type, rules.op, ": ", t.name, " must be a ", rules.device,
              " tensor like a, but it is on another kind of device: move it there.");
  // The CPU has no index, or any.
  TPK_REQUIRE(t.device_index == a.device_index || t.device_type == aoti_torch_device_type_cpu(), rules.op,
              ": ", t.name, " must be on the device of a, cuda:", a.device_index,
              ", but it is on cuda:", t.device_index, ".");
}

inline void check_once(const GemmRules& rules, const View& t) {
  TPK_REQUIRE(rules.is_once(t.type), rules.op, ": ", t.name, " must be ", rules.once, ", but it is ", t.type,
              ": convert it.");
}

// A factor on the right: [batch, K, N].
inline void check_right(const GemmRules& rules, const View& t, const View& a) {
  check_device(rules, t, a);
  TPK_REQUIRE(t.dim == 3, rules.op, ": ", t.name, " must have shape [batch, K, N], but it has shape ",
              shape_text(t), ".");
  TPK_REQUIRE(t.sizes[0] == a.sizes[0], rules.op, ": ", t.name, " must have the batch size of a, ",
              a.sizes[0], ", but it has ", t.sizes[0], ": expand it (a stride of 0 costs nothing).");
  TPK_REQUIRE(t.sizes[1] == a.sizes[2], rules.op, ": ", t.name,
              " must have as many rows as a has columns (K = ", a.sizes[2], "), but it has ", t.sizes[1],
              ".");
  TPK_REQUIRE(t.type == a.type, rules.op, ": ", t.name, " must have the dtype of a, ", a.type, ", but it is ",
              t.type, ": convert one of them.");
}

inline void check_written(const GemmRules& rules, const View& t, const View& a, const Problem& p) {
  check_device(rules, t, a);
  check_shape(rules.op, t, {p.batch, p.m, p.n}, "[batch, M, N]");
  check_once(rules, t);
  for (int64_t d = 0; d < 3; ++d) {
    TPK_REQUIRE(
        t.sizes[d] <= 1 || t.strides[d] != 0, rules.op, ": ", t.name,
        " must not be broadcast (its stride along dimension ", d,
        " is 0): several results would be written to one element. Pass a tensor with memory of its own.");
  }
}

inline void check_memory(const GemmRules& rules, const GemmArguments& g) {
  for (const View* read : {&g.a, &g.b, &g.bias, &g.gate}) check_separate(rules.op, *read, g.out);
  for (const View* read : {&g.out, &g.a, &g.b, &g.bias, &g.residual}) {
    check_separate(rules.op, *read, g.preact);
  }
  // Each element of residual is read by whoever writes that element of out, just before.
  if (!g.residual.exists() || same_elements(g.residual, g.out)) return;
  TPK_REQUIRE(!may_overlap(g.residual, g.out), rules.op,
              ": residual must be out itself (the same view) or share no memory with it: some of it would be "
              "read after it was overwritten. Pass another out.");
}

}  // namespace detail

inline void check_no_more_than_gate(const char* op, bool has_bias, bool has_preact) {
  TPK_REQUIRE(
      !has_bias, op,
      ": bias must be None where there is a gate: which of the two products it belongs to is not defined. "
      "Compute them apart.");
  TPK_REQUIRE(
      !has_preact, op,
      ": preact must be None where there is a gate: there would be two. Compute the two products apart.");
}

inline GemmArguments check_gemm(const GemmRules& rules, const torch::stable::Tensor& a,
                                const torch::stable::Tensor& b,
                                const std::optional<torch::stable::Tensor>& bias,
                                const torch::stable::Tensor& out,
                                const std::optional<torch::stable::Tensor>& preact,
                                const std::optional<torch::stable::Tensor>& gate,
                                const std::optional<torch::stable::Tensor>& residual, int64_t workers,
                                int64_t splits, int64_t multiprocessors) {
  const char* op = rules.op;
  GemmArguments g;
  g.a = view_of("a", a);
  TPK_REQUIRE(g.a.device_type == rules.device_type, op, ": a must be a ", rules.device,
              " tensor, but it is on another kind of device.");
  TPK_REQUIRE(g.a.dim == 3, op, ": a must have shape [batch, M, K], but it has shape ", shape_text(g.a), ".");
  TPK_REQUIRE(rules.is_operand(g.a.type), op, ": a must be ", rules.operands, ", but it is ", g.a.type,
              ": convert it.");
  g.b = view_of("b", b);
  detail::check_right(rules, g.b, g.a);
  g.problem = {g.a.sizes[1], g.b.sizes[2], g.a.sizes[2], g.a.sizes[0]};
  const Problem& p = g.problem;
  g.out = view_of("out", out);
  detail::check_written(rules, g.out, g.a, p);
  if (bias.has_value()) {
    g.bias = view_of("bias", *bias);
    detail::check_device(rules, g.bias, g.a);
    check_shape(op, g.bias, {p.n}, "[N]");
    detail::check_once(rules, g.bias);
  }
  if (preact.has_value()) {
    g.preact = view_of("preact", *preact);
    detail::check_written(rules, g.preact, g.a, p);
    TPK_REQUIRE(g.preact.type == g.out.type, op, ": preact must have the dtype of out, ", g.out.type,
                ", but it is ", g.preact.type, ".");
  }
  if (gate.has_value()) {
    check_no_more_than_gate(op, bias.has_value(), preact.has_value());
    g.gate = view_of("gate", *gate);
    detail::check_right(rules, g.gate, g.a);
    check_shape(op, g.gate, {p.batch, p.k, p.n}, "[batch, K, N]");
  }
  if (residual.has_value()) {
    g.residual = view_of("residual", *residual);
    detail::check_device(rules, g.residual, g.a);
    check_shape(op, g.residual, {p.batch, p.m, p.n}, "[batch, M, N]");
    detail::check_once(rules, g.residual);
  }
  TPK_REQUIRE(workers >= 0, op, ": workers must be 0 (as many as fit) or more, but it is ", workers, ".");
  TPK_REQUIRE(splits >= 1, op, ": splits must be at least 1, but it is ", splits, ".");
  TPK_REQUIRE(multiprocessors >= 0, op, ": multiprocessors must be 0 (all) or more, but it is ",
              multiprocessors, ".");
  detail::check_memory(rules, g);
  return g;
}

}  // namespace tpk::ops
