// Stepped mode, the emulator's side; stepped_api.h says what it is.
//
// Invariant: everything here is read and written under the emulator's lock.
#pragma once

#include "api.h"
#include "stepped_api.h"
#include "stream.h"

namespace emu {

bool Stepped();
unsigned long long SteppedMemory();  // 0: as set
bool OnlyGuaranteed();               // EmuStepped::guaranteed
bool FreeReturns();                  // cuMemFree of device memory does not wait

void Busy(Stream& stream);                          // it has work
void Force(Lock& lock, const Tasks& tasks);         // runs what they need
void Progress(Lock& lock);                          // a query is made
void Remember(const Stream& stream, Clock before);  // the calling thread's last task is the stream's

// The host knows that all of it is complete.
void Observe(const Clock& known);
// Whether a query may say that all of it is complete.
bool MayTell(const Clock& asked);
// The same for what only the driver itself knows.
void ObserveInside(const Clock& known);
const Clock& KnownToHost();

}  // namespace emu
