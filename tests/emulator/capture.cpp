#include "capture.h"

#include <algorithm>
#include <utility>

#include "driver.h"

namespace emu {
namespace {

thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

using CapturePtr = std::shared_ptr<Capture>;

std::vector<CapturePtr>& open_captures() {
  static auto* const captures = new std::vector<CapturePtr>;
  return *captures;
}

void Join(const CapturePtr& capture, Stream& stream) {
  stream.capture = capture;
  stream.captured = 0;
  stream.capture_seen.clear();
  capture->streams.push_back(stream.shared_from_this());
}

// Begins a capture of a stream into a graph; a begin is itself harmless to other captures.
void Begin(CUstream handle, CUstreamCaptureMode mode, std::shared_ptr<Graph> graph, CUgraph graph_handle) {
  static std::uint64_t last_id = 0;
  Require(mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
  const StreamPtr stream = StreamOf(handle);
  Require(stream->kind != Stream::Kind::kLegacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  Require(stream->capture == nullptr, CUDA_ERROR_ILLEGAL_STATE);
  auto capture = std::make_shared<Capture>();
  capture->id = ++last_id;
  capture->mode = mode;
  capture->thread = ThreadToken();
  capture->origin = stream.get();
  capture->graph = std::move(graph);
  capture->graph_handle = graph_handle;
  Join(capture, *stream);
  open_captures().push_back(std::move(capture));
}

// The capture is over for all its streams.
void Close(const CapturePtr& capture) {
  for (const StreamPtr& stream : capture->streams) stream->capture = nullptr;
  capture->streams.clear();
  std::erase(open_captures(), capture);
}

// Whether all work of the capture's other streams was joined into its origin.
bool Joined(const Capture& capture) {
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const StreamPtr& stream) {
    if (stream.get() == capture.origin) return true;
    const auto known = capture.origin->capture_seen.find(stream->id);
    return known != capture.origin->capture_seen.end() && known->second >= stream->captured;
  });
}

CUstreamCaptureStatus StatusOf(const Stream& stream) {
  if (stream.capture == nullptr) return CU_STREAM_CAPTURE_STATUS_NONE;
  return stream.capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

// Whether the capture forbids the calling thread what is unsafe.
bool Forbids(const CapturePtr& capture) {
  if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
  return capture->thread == ThreadToken() ||
         (capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

void RequireValid(const Capture& capture) { Require(!capture.invalid, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED); }

}  // namespace

void Invalidate(Capture& capture) { capture.invalid = true; }

void LeaveCapture(Stream& stream) {
  const CapturePtr capture = stream.capture;
  if (capture == nullptr) return;
  Invalidate(*capture);
  if (capture->origin == &stream) Close(capture);
}

bool CaptureForbids() { return std::any_of(open_captures().begin(), open_captures().end(), Forbids); }

void RefuseDuringCapture() {
  bool refused = false;
  for (const CapturePtr& capture : open_captures()) {
    if (!Forbids(capture)) continue;
    Invalidate(*capture);
    refused = true;
  }
  Require(!refused, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void RefuseOn(const Stream& stream) {
  if (stream.capture == nullptr) return;
  Invalidate(*stream.capture);
  Fail(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

void RefuseLegacyDuringCapture(const Context& context) {
  bool refused = false;
  for (const StreamPtr& stream : context.streams) {
    if (stream->capture == nullptr || !stream->blocking()) continue;
    Invalidate(*stream->capture);
    refused = true;
  }
  Require(!refused, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
}

void AddNode(Stream& stream, Work run) {
  RequireValid(*stream.capture);
  stream.capture->graph->nodes.push_back(std::move(run));
  stream.capture_seen[stream.id] = ++stream.captured;
}

void RecordInCapture(Stream& stream, Event& event) {
  RequireValid(*stream.capture);
  event.Record({}, {});
  event.capture = stream.capture;
  event.capture_clock = stream.capture_seen;
  event.capture_clock.try_emplace(stream.id, 0);
}

void WaitInCapture(Stream& stream, Event& event) {
  if (event.capture == nullptr) {  // from outside into the capture
    if (!event.recorded) return;
    Invalidate(*stream.capture);
    Fail(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  }
  RequireValid(*event.capture);
  if (stream.capture == nullptr) {
    Require(stream.kind != Stream::Kind::kLegacy, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    Require(!event.capture->streams.empty(), CUDA_ERROR_CAPTURED_EVENT);
    Join(event.capture, stream);
  } else if (stream.capture != event.capture) {
    Invalidate(*stream.capture);
    Invalidate(*event.capture);
    Fail(CUDA_ERROR_STREAM_CAPTURE_MERGE);
  }
  Merge(stream.capture_seen, event.capture_clock);
}

CUresult StreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  Lock lock(global_mutex());
  Require(status != nullptr);
  *status = StatusOf(*StreamOf(handle));
  return CUDA_SUCCESS;
}

CUresult StreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  Lock lock(global_mutex());
  Begin(handle, mode, std::make_shared<Graph>(), nullptr);
  return CUDA_SUCCESS;
}

CUresult StreamBeginCaptureGlobal(CUstream handle) { return StreamBeginCapture(handle, CU_STREAM_CAPTURE_MODE_GLOBAL); }

CUresult StreamBeginCaptureToGraph(CUstream handle, CUgraph graph_handle, const CUgraphNode*, const CUgraphEdgeData*,
                                   size_t, CUstreamCaptureMode mode) {
  Lock lock(global_mutex());
  std::shared_ptr<Graph> graph = driver().graphs.Find(graph_handle);
  Require(graph != nullptr);
  Begin(handle, mode, std::move(graph), graph_handle);
  return CUDA_SUCCESS;
}

CUresult StreamEndCapture(CUstream handle, CUgraph* out) {
  Lock lock(global_mutex());
  Require(out != nullptr);
  *out = nullptr;
  const StreamPtr stream = StreamOf(handle);
  const CapturePtr capture = stream->capture;
  Require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
  Require(capture->origin == stream.get(), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  Require(capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == ThreadToken(),
          CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  const bool joined = Joined(*capture);
  Close(capture);
  RequireValid(*capture);
  Require(joined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
  *out = capture->graph_handle != nullptr ? capture->graph_handle : driver().graphs.Add(capture->graph);
  return CUDA_SUCCESS;
}

CUresult StreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id) {
  Lock lock(global_mutex());
  Require(status != nullptr);
  const StreamPtr stream = StreamOf(handle);
  *status = StatusOf(*stream);
  if (id != nullptr) *id = stream->capture != nullptr ? stream->capture->id : 0;
  return CUDA_SUCCESS;
}

CUresult StreamGetCaptureInfoWithGraph(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** dependencies, size_t* count) {
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (count != nullptr) *count = 0;
  return StreamGetCaptureInfo(handle, status, id);
}

CUresult StreamGetCaptureInfoWithEdges(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
  if (edges != nullptr) *edges = nullptr;
  return StreamGetCaptureInfoWithGraph(handle, status, id, graph, dependencies, count);
}

CUresult ThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  Require(mode != nullptr && *mode >= CU_STREAM_CAPTURE_MODE_GLOBAL && *mode <= CU_STREAM_CAPTURE_MODE_RELAXED);
  std::swap(*mode, thread_mode);
  return CUDA_SUCCESS;
}

}  // namespace emu
