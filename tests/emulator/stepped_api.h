// Stepped mode: the device works only where a call makes it, and says what it knows of order.
//
// For programs that check order (tests/order). No stream has a thread: work stays in its queue until a host wait needs
// it, and then only what the wait needs runs; or until a query is made, which lets a part of the rest run that the seed
// chooses, often none. So "not complete" is as common as "complete", and a run repeats itself exactly. A wait whose
// work comes after a kernel that spins on a host flag cannot end: it is reported as a deadlock.
//
// What is ordered is said by clocks (task.h). A task comes after what its stream has seen, and after all that the host
// knew to be complete when it was put there: everything that any call waited for, or asked and was told. Host accesses
// that the program announces lie on a line of their own, which has the id 0.
//
// A stream-ordered allocation or free orders its own memory only: it is no action by which the legacy stream orders
// others. (The manual can be read so; it is not measured.)
//
// A program turns the mode on before cuInit by emuStepped(), found by dlsym. Its threads take turns: one calls at a
// time. Cost: a clock is copied for every task.
#pragma once

#include <cuda.h>

extern "C" {

struct EmuPoint {  // a place in the order: the count-th task of a stream, or of the host
  unsigned long long stream;
  unsigned long long count;
};

struct EmuStepped {
  unsigned long long seed;
  unsigned long long memory;  // bytes of each device; 0: as set
  // Only what every driver must give: queries let nothing run, and say "complete" of what the host knows already; what
  // the emulated pools do for themselves counts as no order.
  int guaranteed;
  // cuMemFree of device memory does not wait: the order that a program has without it.
  int free_returns;
  void (*deadlock)(const char* what);  // must not return
};

__attribute__((visibility("default"))) void emuStepped(const EmuStepped* settings);

// The calling thread's last task, and whether it comes after a point.
__attribute__((visibility("default"))) void emuLast(EmuPoint* point);
__attribute__((visibility("default"))) int emuLastIsAfter(const EmuPoint* point);
// The host touches memory now: counts as the calling thread's last task.
__attribute__((visibility("default"))) void emuHostAccess(void);
// Whether work put on the stream now would come after a point; `itself`: without what the legacy stream's rule would
// add then.
__attribute__((visibility("default"))) int emuStreamIsAfter(CUstream stream, const EmuPoint* point, int itself);

// Whether the host knows that a point is passed.
__attribute__((visibility("default"))) int emuHostIsAfter(const EmuPoint* point);

// Whether a wait for it could not end as things are.
__attribute__((visibility("default"))) int emuContextIsStuck(CUcontext context);
__attribute__((visibility("default"))) int emuStreamIsStuck(CUstream stream);
__attribute__((visibility("default"))) int emuEventIsStuck(CUevent event);

// Whether a call that is unsafe during captures would be refused to the calling thread.
__attribute__((visibility("default"))) int emuCaptureForbids(void);

}  // extern "C"
