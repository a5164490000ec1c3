#include "comm/copy_engine.hpp"

#include <cuda.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace tpk::comm {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorString(error) + ".");
}

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

// Not linked: import has to work where there is no driver.
StreamValue find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    throw std::runtime_error("the driver has no " + std::string(name) +
                             ": install one for CUDA 12 or newer.");
  }
  return reinterpret_cast<StreamValue>(function);
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " failed with CUresult " + std::to_string(result) + ".");
}

}  // namespace

CopyEngine& CopyEngine::of(int device, Purpose purpose) {
  static std::mutex mutex;
  static std::map<std::pair<int, Purpose>, std::unique_ptr<CopyEngine>> engines;
  const std::lock_guard lock(mutex);
  std::unique_ptr<CopyEngine>& engine = engines[{device, purpose}];
  if (engine == nullptr) engine.reset(new CopyEngine(purpose == Purpose::kCall ? kStreams : 1));
  return *engine;
}

CopyEngine::CopyEngine(int streams) : streams_(streams) {
  int least = 0;
  int most = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &most), "cudaDeviceGetStreamPriorityRange");
  const auto make = [](cudaEvent_t* event) {
    check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  };
  for (Stream& s : streams_) {
    check(cudaStreamCreateWithPriority(&s.stream, cudaStreamNonBlocking, most),
          "cudaStreamCreateWithPriority");
    make(&s.joined);
  }
  make(&forked_);
}

CopyEngine::Call::Call(CopyEngine& engine, cudaStream_t main)
    : engine_(engine), lock_(engine.mutex_), main_(main) {
  check(cudaEventRecord(engine_.forked_, main_), "cudaEventRecord");
  for (Stream& s : engine_.streams_) s.is_used = false;
  use(0);
}

void CopyEngine::Call::use(int stream) {
  current_ = stream;
  Stream& s = engine_.streams_.at(stream);
  if (s.is_used) return;
  s.is_used = true;
  check(cudaStreamWaitEvent(s.stream, engine_.forked_, 0), "cudaStreamWaitEvent");
}

void CopyEngine::Call::join() {
  joined_ = true;
  engine_.join(main_);
}

void CopyEngine::Call::leave_open() { joined_ = true; }

void CopyEngine::join(cudaStream_t main) {
  for (Stream& s : streams_) {
    if (!s.is_used) continue;
    s.is_used = false;
    check(cudaEventRecord(s.joined, s.stream), "cudaEventRecord");
    check(cudaStreamWaitEvent(main, s.joined, 0), "cudaStreamWaitEvent");
  }
}

// A call that failed half way must not leave a capture that cannot end.
CopyEngine::Call::~Call() {
  try {
    if (!joined_) join();
  } catch (const std::exception&) {
  }
}

void CopyEngine::Call::push(Rows to, Rows from, size_t row_bytes, int64_t rows, uint32_t* word,
                            const uint32_t* epoch) {
  const Transport* const other = transport();
  if (other == nullptr || !other->reaches(word)) {
    copy(to, from, row_bytes, rows);
    raise(word, epoch);
    return;
  }
  char message[512] = "";
  const Push all{to.data, to.pitch, from.data, from.pitch, row_bytes, rows, word, epoch};
  if (!other->push(all, stream(), message, sizeof message)) throw std::runtime_error(message);
}

void CopyEngine::Call::copy(Rows to, Rows from, size_t row_bytes, int64_t rows) {
  if (rows == 0 || row_bytes == 0) return;
  if (rows == 1 || (to.pitch == row_bytes && from.pitch == row_bytes)) {
    check(cudaMemcpyAsync(to.data, from.data, row_bytes * rows, cudaMemcpyDefault, stream()),
          "cudaMemcpyAsync");
    return;
  }
  check(cudaMemcpy2DAsync(to.data, to.pitch, from.data, from.pitch, row_bytes, static_cast<size_t>(rows),
                          cudaMemcpyDefault, stream()),
        "cudaMemcpy2DAsync");
}

void CopyEngine::Call::raise(uint32_t* word, const uint32_t* epoch) {
  check(cudaMemcpyAsync(word, epoch, sizeof(uint32_t), cudaMemcpyDefault, stream()), "cudaMemcpyAsync");
}

namespace {

// Waits and writes of values are captured in this mode only; the thread has its own one back afterwards.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void write_value(cudaStream_t stream, uint32_t* word, uint32_t value) {
  static const StreamValue write = find("cuStreamWriteValue32");
  const RelaxedCapture relaxed;
  check(write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue32");
}

}  // namespace

void CopyEngine::Call::raise_bell(uint32_t* bell) { write_value(stream(), bell, 1); }

void CopyEngine::Call::take_bell(uint32_t* bell) {
  static const StreamValue wait = find("cuStreamWaitValue32");
  const RelaxedCapture relaxed;
  check(wait(stream(), reinterpret_cast<CUdeviceptr>(bell), 1, CU_STREAM_WAIT_VALUE_EQ),
        "cuStreamWaitValue32");
  write_value(stream(), bell, 0);
}

}  // namespace tpk::comm
