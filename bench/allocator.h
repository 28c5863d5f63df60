// Allocator: what a program allocates with, made from its command line.
//
// A source that includes this is an ordinary CUDA program (cuda_allocator.h), and is built a second time, linked with
// RMM, if there is an RMM (rmm_allocator.h). Either header has one class:
//
//   Allocator(argc, argv, reserve)  takes its flags. --allocator=NAME is what the benchmarks' names say.
//                                   reserve: an allocator whose memory is reserved beforehand may do so
//   name()                          that NAME
//   start_anew()                    brings the process to where nothing was allocated yet
//   use(work)                       calls work(resource), and gives the resource up after it. resource.on(stream) is an
//                                   Api (workloads.h), resource.held() the peak of bytes taken from the driver, if
//                                   known
#pragma once

#ifdef CUSHION_BENCH_RMM
#include "rmm_allocator.h"
#else
#include "cuda_allocator.h"
#endif
