// The arguments of streamk_gemm_grouped, checked; as gemm_arguments.hpp for one product.
#pragma once

#include <optional>
#include <vector>

#include "ops/gemm_arguments.hpp"

namespace tpk::ops {

// The tensors as views; which do not exist were not given. problem: m of all rows, batch 1.
struct GroupedArguments {
  View a;     // [rows, K]
  View b;     // [groups, K, N]
  View gate;  // [groups, K, N]
  View bias;  // [groups, N]
  View out;   // [rows, N]
  View preact;
  Problem problem;
};

inline GroupedArguments check_grouped(
    const GemmRules& rules, const torch::stable::Tensor& a, const torch::stable::Tensor& b,
    const std::optional<torch::stable::Tensor>& bias, const torch::stable::Tensor& out,
    const std::optional<torch::stable::Tensor>& preact, const std::optional<torch::stable::Tensor>& gate,
    const std::vector<int64_t>& group_sizes, int64_t workers, int64_t splits, int64_t multiprocessors) {
  const char* op = rules.op;
  GroupedArguments g;
  g.a = view_of("a", a);
  TPK_REQUIRE(g.a.device_type == rules.device_type, op, ": a must be a ", rules.device,
              " tensor, but it is on another kind of device.");
  TPK_REQUIRE(g.a.dim == 2, op, ": a must have shape [rows, K], but it has shape ", shape_text(g.a), ".");
  TPK_REQUIRE(rules.is_operand(g.a.type), op, ": a must be ", rules.operands, ", but it is ", g.a.type,
              ": convert it.");
  g.b = view_of("b", b);
  const auto groups = static_cast<int64_t>(group_sizes.size());
  const auto check_weights = [&](const View& t) {
    detail::check_device(rules, t, g.a);
    TPK_REQUIRE(t.dim == 3 && t.sizes[0] == groups && t.sizes[1] == g.a.sizes[1], op, ": ", t.name,
                " must have shape [groups, K, N] with ", groups,
                " groups, the length of group_sizes, and K = ", g.a.sizes[1], ", but it has shape ",
                shape_text(t), ".");
    TPK_REQUIRE(t.type == g.a.type, op, ": ", t.name, " must have the dtype of a, ", g.a.type, ", but it is ",
                t.type, ": convert one of them.");
  };
  check_weights(g.b);
  int64_t rows = 0;
  for (int64_t i = 0; i < groups; ++i) {
    TPK_REQUIRE(group_sizes[i] >= 0, op, ": group_sizes must not be negative, but entry ", i, " is ",
                group_sizes[i], ".");
    rows += group_sizes[i];
  }
  TPK_REQUIRE(rows == g.a.sizes[0], op, ": group_sizes must add up to the rows of a, ", g.a.sizes[0],
              ", but they add up to ", rows, ".");
  g.problem = {rows, g.b.sizes[2], g.a.sizes[1], 1};
  const auto check_written = [&](const View& t) {
    detail::check_device(rules, t, g.a);
    check_shape(op, t, {rows, g.problem.n}, "[rows, N]");
    detail::check_once(rules, t);
    for (int64_t d = 0; d < 2; ++d) {
      TPK_REQUIRE(t.sizes[d] <= 1 || t.strides[d] != 0, op, ": ", t.name,
                  " must not be broadcast (its stride along dimension ", d,
                  " is 0): several results would be written to one element. Pass a tensor with memory of its "
                  "own.");
    }
  };
  g.out = view_of("out", out);
  check_written(g.out);
  if (bias.has_value()) {
    g.bias = view_of("bias", *bias);
    detail::check_device(rules, g.bias, g.a);
    check_shape(op, g.bias, {groups, g.problem.n}, "[groups, N]");
    detail::check_once(rules, g.bias);
  }
  if (preact.has_value()) {
    g.preact = view_of("preact", *preact);
    check_written(g.preact);
    TPK_REQUIRE(g.preact.type == g.out.type, op, ": preact must have the dtype of out, ", g.out.type,
                ", but it is ", g.preact.type, ".");
  }
  if (gate.has_value()) {
    check_no_more_than_gate(op, bias.has_value(), preact.has_value());
    g.gate = view_of("gate", *gate);
    check_weights(g.gate);
    check_shape(op, g.gate, {groups, g.problem.k, g.problem.n}, "[groups, K, N]");
  }
  TPK_REQUIRE(workers >= 0, op, ": workers must be 0 (as many as fit) or more, but it is ", workers, ".");
  TPK_REQUIRE(splits >= 1, op, ": splits must be at least 1, but it is ", splits, ".");
  TPK_REQUIRE(multiprocessors >= 0, op, ": multiprocessors must be 0 (all) or more, but it is ",
              multiprocessors, ".");
  for (const View* read : {&g.a, &g.b, &g.gate, &g.bias}) check_separate(op, *read, g.out);
  for (const View* read : {&g.out, &g.a, &g.b, &g.bias}) check_separate(op, *read, g.preact);
  return g;
}

// Calls product(group, first row, rows) for every group that has rows.
template <class Product>
void for_each_group(const std::vector<int64_t>& group_sizes, const Product& product) {
  int64_t begin = 0;
  for (size_t i = 0; i < group_sizes.size(); ++i) {
    if (group_sizes[i] > 0) product(static_cast<int64_t>(i), begin, group_sizes[i]);
    begin += group_sizes[i];
  }
}

}  // namespace tpk::ops
