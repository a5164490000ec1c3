// torch.ops.tpkernels.streamk_plan: what streamk_gemm would do, without doing it. No tensor is involved, so
// it runs on any machine: the plan of a CUDA product needs no GPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/grouped_calls.hpp"
#include "kernels/sm80/plan.hpp"
#include "kernels/sm90a/plan.hpp"
#include "ops/cpu_threads.hpp"
#include "ops/fused_chunks.hpp"
#include "ops/sentence.hpp"

namespace {

using tpk::sm90a::Product;

// What a name of the Hopper kernel's device says of operands.
Product product_of(const std::string& device) {
  return device == "sm90-fp8"          ? Product::kPromoted
         : device == "sm90-fp8-fast"   ? Product::kFast
         : device == "sm90-fp8-blocks" ? Product::kBlocks
                                       : Product::kHalf;
}

bool is_hopper(const std::string& device) {
  return device == "sm90" || device == "cuda" || product_of(device) != Product::kHalf;
}

struct Found {
  tpk::Plan plan;
  tpk::TileShape tile;  // of a CTA
  tpk::sm90a::ClusterShape cluster;
  int64_t whole = 0;  // a CTA takes one tile and no part of another: 1 swapped, 2 not
};

// A plan of a kernel that computes a gate by a product of its own, with the same plan. What else follows is
// not in its cost model.
Found as_often(tpk::Plan plan, const tpk::sm90a::Demands& demands) {
  if (demands.gated) plan.predicted_us *= 2;
  return {plan, plan.tile, {}};
}

bool is_half(tpk::Element element) {
  return element == tpk::Element::kBf16 || element == tpk::Element::kFp16;
}

// A CUDA plan assumes what the device holds when it is empty, and for the portable kernel the residency of
// the vector kernels; operands that need element loads, and cards with little shared memory, may get another.
Found find(const tpk::Problem& p, tpk::Element element, const std::string& device,
           const std::string& schedule, int64_t workers, int64_t splits, int64_t multiprocessors,
           const std::string& tile, const tpk::sm90a::Demands& demands, const tpk::sm90a::Ranks& ranks,
           const tpk::GroupedRows* groups = nullptr) {
  if (device == "cpu") {
    return as_often(tpk::ops::cpu_plan("streamk_plan", p, schedule, workers, splits, tile), demands);
  }
  try {
    const bool half = is_half(element);
    TPK_REQUIRE(half || device == "cuda" || !is_hopper(device), "streamk_plan: the Hopper kernel, device '",
                device, "', takes bfloat16 and float16: ask for device 'sm90-portable'.");
    if (half && is_hopper(device)) {
      const auto residency = tpk::sm90a::full_residency(multiprocessors > 0 ? multiprocessors : 132);
      const auto g =
          tpk::sm90a::plan_gemm(p, schedule, workers, splits, tile, demands, residency, ranks, groups);
      return {g.plan, tpk::sm90a::tile_shape(g.tile), g.cluster,
              !is_one_tile(g.tile) ? 0
              : is_swapped(g.tile) ? 1
                                   : 2};
    }
    const bool sm80 = device == "sm80";
    const int64_t count = multiprocessors > 0 ? multiprocessors : sm80 ? 108 : 132;
    const auto generation = sm80 ? tpk::sm80::Generation::kAmpere : tpk::sm80::Generation::kHopper;
    const auto g = tpk::sm80::plan_gemm(p, element, generation, count, schedule, workers, splits, tile,
                                        tpk::sm80::full_residency(element));
    return as_often(g.plan, demands);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(tpk::ops::sentence("streamk_plan: ", error.what()));
  }
}

tpk::Element parse_element(const std::string& dtype) {
  if (dtype == "bfloat16") return tpk::Element::kBf16;
  if (dtype == "float16") return tpk::Element::kFp16;
  if (dtype == "float32") return tpk::Element::kFp32;
  if (dtype == "tf32") return tpk::Element::kTf32;
  TPK_REQUIRE(
      dtype == "float64",
      "streamk_plan: dtype must be 'bfloat16', 'float16', 'float32', 'tf32' or 'float64', but it is '", dtype,
      "'.");
  return tpk::Element::kFp64;
}

// What the fused ops (ops/sm90a_fused_{gather,reduce}.cpp) tell the planner of rows that come and go.
tpk::sm90a::Ranks ranks_of(const std::string& collective, const std::vector<int64_t>& shard_rows,
                           int64_t rank, int64_t m, int64_t n, int64_t k, int64_t out_bytes, bool stored) {
  tpk::sm90a::Ranks ranks;
  if (collective.empty()) return ranks;
  const bool gather = collective == "all_gather_matmul";
  const bool sums = collective == "matmul_all_reduce";
  TPK_REQUIRE(gather || sums || collective == "matmul_reduce_scatter",
              "streamk_plan: collective must be '', 'all_gather_matmul', 'matmul_reduce_scatter' or "
              "'matmul_all_reduce', but it is '",
              collective, "'.");
  const auto world = static_cast<int64_t>(shard_rows.size());
  TPK_REQUIRE(world >= 2 && world <= tpk::kMaxRanks && rank >= 0 && rank < world,
              "streamk_plan: shard_rows must name 2 to ", tpk::kMaxRanks,
              " ranks, and rank one of them, but there are ", world, " and rank is ", rank, ".");
  TPK_REQUIRE(out_bytes == 2 || out_bytes == 4, "streamk_plan: out_bytes must be 2 or 4, but it is ",
              out_bytes, ".");
  const tpk::protocol::ChunkList chunks =
      gather ? tpk::ops::gathered_chunks(shard_rows, k)
             : tpk::ops::departing_chunks(shard_rows, n, out_bytes, sums, stored);
  ranks.direction = gather ? tpk::sm90a::Direction::kArrival : tpk::sm90a::Direction::kDeparture;
  ranks.rows.world = static_cast<int32_t>(world);
  ranks.rows.rank = static_cast<int32_t>(rank);
  int64_t end = 0;
  for (int64_t r = 0; r < world; ++r) ranks.rows.row_end[r] = static_cast<int32_t>(end += shard_rows[r]);
  TPK_REQUIRE(end == m, "streamk_plan: shard_rows must add up to m = ", m, ", but they add up to ", end, ".");
  if (gather) {
    ranks.num_chunks = chunks.count;
    std::copy(chunks.row_end, chunks.row_end + chunks.count, ranks.chunk_end);
    return ranks;
  }
  const auto order = tpk::protocol::leaving_order(chunks, ranks.rows.rank, ranks.rows.world, sums);
  for (const int32_t c : order) ranks.blocks[ranks.num_blocks++] = {chunks.begin(c), chunks.row_end[c]};
  return ranks;
}

std::tuple<std::string, std::vector<int64_t>, double> streamk_plan(
    int64_t batch, int64_t m, int64_t n, int64_t k, const std::string& device, const std::string& schedule,
    int64_t workers, int64_t splits, int64_t multiprocessors, const std::string& tile, bool gated,
    bool finishes, bool outer_major, const std::vector<int64_t>& group_sizes, const std::string& dtype,
    const std::string& collective, const std::vector<int64_t>& shard_rows, int64_t rank, int64_t out_bytes,
    bool biased, bool stored) {
  TPK_REQUIRE(device == "sm80" || device == "cpu" || device == "sm90-portable" || is_hopper(device),
              "streamk_plan: device must be 'cpu', 'cuda', 'sm80', 'sm90', 'sm90-portable', 'sm90-fp8', "
              "'sm90-fp8-fast' or 'sm90-fp8-blocks', but it is '",
              device, "'.");
  TPK_REQUIRE(batch >= 0 && m >= 0 && n >= 0 && k >= 0,
              "streamk_plan: batch, m, n and k must not be negative, but they are ", batch, ", ", m, ", ", n,
              " and ", k, ".");
  TPK_REQUIRE(workers >= 0 && multiprocessors >= 0,
              "streamk_plan: workers and multiprocessors must not be negative, but they are ", workers,
              " and ", multiprocessors, ".");
  const tpk::Element element = parse_element(dtype);
  int64_t rows = 0;
  for (const int64_t size : group_sizes) {
    TPK_REQUIRE(size >= 0, "streamk_plan: group_sizes must not be negative, but one is ", size, ".");
    rows += size;
  }
  TPK_REQUIRE(group_sizes.empty() || (rows == m && rows <= std::numeric_limits<int32_t>::max()),
              "streamk_plan: group_sizes must add up to m = ", m, ", below 2^31, but they add up to ", rows,
              ".");
  TPK_REQUIRE(collective.empty() || (batch == 1 && group_sizes.empty()),
              "streamk_plan: a product with a collective takes no batch and no group_sizes.");
  const auto ranks = [&] {
    try {
      return ranks_of(collective, shard_rows, rank, m, n, k, out_bytes, stored);
    } catch (const std::invalid_argument& error) {
      throw std::runtime_error(tpk::ops::sentence("streamk_plan: ", error.what()));
    }
  }();
  tpk::sm90a::Demands demands{gated, gated || finishes, outer_major, 1, product_of(device)};
  if (biased) demands.rounds = true;
  demands.wide = out_bytes == 4;
  if (demands.wide) demands.rounds = false;
  const auto plan_of = [&](int64_t of_m, int64_t matrices, const tpk::GroupedRows* groups) {
    demands.matrices = matrices;
    return find({of_m, n, k, batch}, element, device, schedule, workers, splits, multiprocessors, tile,
                demands, ranks, groups);
  };
  std::vector<Found> launches;
  if (is_half(element) && is_hopper(device)) {
    for (const tpk::GroupedRows& groups : tpk::grouped_calls(group_sizes))
      launches.push_back(plan_of(groups.num_rows(), groups.count, &groups));
  } else {
    for (const int64_t size : group_sizes) {
      if (size > 0) launches.push_back(plan_of(size, 1, nullptr));
    }
  }
  if (launches.empty()) launches.push_back(plan_of(m, 1, nullptr));
  int64_t tiles = 0;
  int64_t slots = 0;
  double predicted_us = 0;
  for (const Found& f : launches) {
    tiles += f.plan.order.size();
    slots += f.plan.schedule.num_slots;
    predicted_us += f.plan.predicted_us;
  }
  const Found& f = *std::max_element(launches.begin(), launches.end(), [](const Found& x, const Found& y) {
    return x.plan.predicted_us < y.plan.predicted_us;
  });
  const tpk::Schedule& s = f.plan.schedule;
  std::vector<int64_t> numbers{f.tile.bm,     f.tile.bn, f.tile.bk,   tiles,       s.k_iters,   s.workers,
                               f.plan.splits, slots,     f.cluster.m, f.cluster.n, f.cluster.k, f.whole};
  return {tpk::name(f.plan.kind), std::move(numbers), predicted_us};
}

std::vector<std::string> streamk_whole_tiles(int64_t batch, int64_t m, int64_t n, int64_t k,
                                             int64_t multiprocessors, bool gated, int64_t out_bytes) {
  TPK_REQUIRE(batch >= 0 && m >= 0 && n >= 0 && k >= 0 && multiprocessors >= 0,
              "streamk_whole_tiles: batch, m, n, k and multiprocessors must not be negative, but they are ",
              batch, ", ", m, ", ", n, ", ", k, " and ", multiprocessors, ".");
  const auto residency = tpk::sm90a::full_residency(multiprocessors > 0 ? multiprocessors : 132);
  tpk::sm90a::Demands demands{gated, gated};
  demands.wide = out_bytes == 4;
  std::vector<std::string> names;
  for (const auto& g : tpk::sm90a::candidates({m, n, k, batch}, "auto", 0, 1, "", demands, residency)) {
    if (is_one_tile(g.tile)) names.push_back(name(g.tile, g.cluster));
  }
  return names;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tpkernels, CompositeExplicitAutograd, m) {
  m.impl("streamk_plan", TORCH_BOX(&streamk_plan));
  m.impl("streamk_whole_tiles", TORCH_BOX(&streamk_whole_tiles));
}
