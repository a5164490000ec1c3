// A shard of rows on its way to all ranks: what a gather in front of a product, and one beneath another,
// share.
#pragma once

#include <vector>

#include "ops/fused_chunks.hpp"
#include "ops/fused_group.hpp"

namespace tpk::ops {

// Rows of a matrix of 2-byte elements, K contiguous, into every peer's buffer [M, K rounded up to 8].
class GatherPushes {
 public:
  static constexpr int64_t kBytes = 2;

  GatherPushes(const char* op, const Tensor& shard, const Group& g, const std::vector<int64_t>& shard_rows)
      : g_(g), first_(g.rows.begin(g.rank())) {
    const int64_t own = g.rows_of(g.rank());
    const int64_t k = shard.size(1);
    check_matrix(op, "a_shard", shard, own, k);
    TPK_REQUIRE(k > 0 && (k == 1 || shard.stride(1) == 1), op,
                ": a_shard must have K above 0, and K contiguous.");
    pitch_ = gathered_pitch(k);
    row_bytes_ = static_cast<size_t>(k * kBytes);
    chunks_ = gathered_chunks(shard_rows, k);
    stride_ = own > 1 ? shard.stride(0) : pitch_;
    shard_ = {shard.data_ptr(), static_cast<size_t>(stride_ * kBytes)};
  }

  const protocol::ChunkList& chunks() const { return chunks_; }
  int64_t pitch() const { return pitch_; }    // of a buffer, in elements
  int64_t stride() const { return stride_; }  // of the shard
  size_t row_bytes() const { return row_bytes_; }
  Rows shard() const { return shard_; }
  Rows buffer(int rank) const { return {g_.page(rank).buffer(), static_cast<size_t>(pitch_ * kBytes)}; }

  // Every chunk to every peer, behind what the engine waits for.
  void enqueue(CopyEngine::Call& engine) const {
    struct Pushes {
      CopyEngine::Call& engine;
      const GatherPushes& all;
      void push(int peer, int32_t c, int index) {
        const int64_t begin = all.chunks_.begin(c);
        engine.push(all.buffer(peer).from(begin), all.shard_.from(begin - all.first_), all.row_bytes_,
                    all.chunks_.rows(c), all.g_.page(peer).arrived(index), all.g_.mine().epoch());
      }
    } pushes{engine, *this};
    protocol::push_gather(pushes, chunks_, g_.rank(), g_.world());
  }

  // Own rows [begin, end) of the shard to rows of `to`, on the caller's stream.
  void copy_own(const char* op, Rows to, int64_t begin, int64_t end) const {
    copy_rows(op, to.from(begin), shard_.from(begin), end - begin);
  }
  void copy_rows(const char* op, Rows to, Rows from, int64_t rows) const {
    if (rows <= 0) return;
    const cudaError_t error =
        cudaMemcpy2DAsync(to.data, to.pitch, from.data, from.pitch, row_bytes_, static_cast<size_t>(rows),
                          cudaMemcpyDeviceToDevice, g_.stream);
    TPK_REQUIRE(error == cudaSuccess, op, ": cudaMemcpy2DAsync failed: ", cudaGetErrorString(error), ".");
  }

 private:
  const Group& g_;
  int64_t first_;
  int64_t pitch_ = 0;
  int64_t stride_ = 0;
  size_t row_bytes_ = 0;
  Rows shard_;
  protocol::ChunkList chunks_;
};

}  // namespace tpk::ops
