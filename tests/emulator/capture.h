// Stream capture: while a stream captures, what is put on it becomes nodes of a graph (contract §4).
//
// Which calls are refused depends on the capture's mode, on the calling thread, and on the mode that thread asked for
// with cuThreadExchangeStreamCaptureMode. A refused call answers 900 and invalidates the captures that forbid it;
// their ends answer 901.
#pragma once

#include "stream.h"

namespace emu {

struct Event;
struct Graph;

struct Capture {
  std::uint64_t id = 0;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::uint64_t thread = 0;
  bool invalid = false;
  Stream* origin = nullptr;
  std::vector<StreamPtr> streams;
  std::shared_ptr<Graph> graph;
  CUgraph graph_handle = nullptr;  // set while the graph is the program's own (begin capture to graph)
};

void Invalidate(Capture& capture);

// A stream that is destroyed ends the capture it began, and spoils one it joined.
void LeaveCapture(Stream& stream);

// For calls that are unsafe anywhere in a capturing thread, and in any thread beside a global capture.
void RefuseDuringCapture();
bool CaptureForbids();  // whether it would refuse

// For calls that are unsafe on a capturing stream.
void RefuseOn(const Stream& stream);

// 906, and the end of the capture, for any use of the legacy stream while a blocking stream of its context captures.
void RefuseLegacyDuringCapture(const Context& context);

void AddNode(Stream& stream, Work run);
void RecordInCapture(Stream& stream, Event& event);
void WaitInCapture(Stream& stream, Event& event);

}  // namespace emu
