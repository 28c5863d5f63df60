// A program that threads keep allocating in, told by lines on its standard input what to do besides; it answers each
// with a line. So a test knows to the byte what is live when it asks Cushion.
//
//     churn [THREADS] [handle]     handle: it handles SIGUSR2 itself
//
//     go                 the threads allocate and free until `pause`
//     pause              -> paused BLOCKS BYTES      live in all threads
//     allocate N SIZE    -> allocated N              kept until the end
//     free               -> freed N                  what was kept
//     fork               -> child CODE               a child that pokes at what it inherited
//     track LEVEL        -> 0|1|…                    cushion_set_track
//     mark NAME          -> …                        cushion_mark
//     report PATH        -> …                        cushion_report
//     exec PROGRAM       becomes `PROGRAM 30`
//     null               -> …                        the C API with null pointers
//     quit               frees everything -> failed N
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <iostream>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "driver_api.h"
#include "include/cushion.h"

namespace {

struct Worker {
  std::vector<std::pair<CUdeviceptr, std::size_t>> blocks{96};
  std::thread thread;
};

struct Program {
  DriverApi api;
  CUcontext context = nullptr;
  std::vector<Worker> workers;
  std::mutex mutex;
  std::condition_variable changed;
  bool going = false;
  bool ending = false;
  std::size_t idle = 0;
  std::atomic<int> failed{0};

  bool wait_for_go() {
    std::unique_lock lock(mutex);
    ++idle;
    changed.notify_all();
    changed.wait(lock, [&] { return going || ending; });
    --idle;
    return !ending;
  }
  bool goes() {
    std::lock_guard lock(mutex);
    return going;
  }
  void pause() {
    std::unique_lock lock(mutex);
    going = false;
    changed.wait(lock, [&] { return idle == workers.size(); });
  }
  void go(bool end) {
    std::lock_guard lock(mutex);
    (end ? ending : going) = true;
    changed.notify_all();
  }

  void churn(Worker& worker, unsigned seed) {
    std::minstd_rand random(seed + 1);
    api.set_current(context);
    while (wait_for_go()) {
      while (goes()) {
        for (int i = 0; i < 100; ++i) {
          auto& [block, size] = worker.blocks[random() % worker.blocks.size()];
          const bool async = random() % 2 == 0;
          CUresult result = CUDA_SUCCESS;
          if (block != 0) {
            result = async ? api.free_async(block, nullptr) : api.free(block);
            block = 0;
          } else {
            size = 1 + random() % 100000;
            result = async ? api.alloc_async(&block, size, nullptr) : api.alloc(&block, size);
          }
          failed += result != CUDA_SUCCESS;
        }
      }
    }
  }
};

int in_child(const DriverApi& api) {
  alarm(20);
  CUdeviceptr block = 0;
  raise(SIGUSR2);  // has no default disposition where the test says so
  const bool serves = cushion_set_track("on") == CUSHION_OK || cushion_mark("child") == CUSHION_OK;
  return api.alloc(&block, 100) == CUDA_SUCCESS || serves ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "handle") != 0) continue;
    // Not std::signal: ThreadSanitizer's leaves SA_RESTART out, and the signal then ends the reading of commands.
    struct sigaction mine {};
    mine.sa_handler = [](int) {};
    mine.sa_flags = SA_RESTART;
    sigaction(SIGUSR2, &mine, nullptr);
  }
  Program program;
  void* driver = open_driver();
  program.api = by_elf_name([=](const char* name) { return dlsym(driver, name); });
  const DriverApi& api = program.api;
  CUdevice device = 0;
  api.init(0);
  api.device_get(&device, 0);
  api.primary_retain(&program.context, device);
  api.set_current(program.context);
  std::vector<CUdeviceptr> kept;

  program.workers = std::vector<Worker>(argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 0);
  unsigned seed = 0;
  for (Worker& worker : program.workers)
    worker.thread = std::thread([&program, &worker, seed = seed++] { program.churn(worker, seed); });

  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command, text;
    words >> command;
    if (command == "go") {
      program.go(false);
    } else if (command == "pause") {
      program.pause();
      std::size_t blocks = 0, bytes = 0;
      for (const Worker& worker : program.workers) {
        for (const auto& [block, size] : worker.blocks) {
          blocks += block != 0;
          bytes += block != 0 ? size : 0;
        }
      }
      std::cout << "paused " << blocks << ' ' << bytes << std::endl;
    } else if (command == "allocate") {
      std::size_t count = 0, size = 0;
      words >> count >> size;
      for (std::size_t i = 0; i < count; ++i) {
        CUdeviceptr block = 0;
        program.failed += api.alloc(&block, size) != CUDA_SUCCESS;
        kept.push_back(block);
      }
      std::cout << "allocated " << count << std::endl;
    } else if (command == "free") {
      for (const CUdeviceptr block : kept) program.failed += api.free(block) != CUDA_SUCCESS;
      std::cout << "freed " << kept.size() << std::endl;
      kept.clear();
    } else if (command == "fork") {
      const pid_t child = fork();
      if (child == 0) std::exit(in_child(api));
      int status = 0;
      waitpid(child, &status, 0);
      std::cout << "child " << (WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)) << std::endl;
    } else if (command == "track") {
      words >> text;
      std::cout << cushion_set_track(text.c_str()) << std::endl;
    } else if (command == "mark") {
      words >> text;
      std::cout << cushion_mark(text.c_str()) << std::endl;
    } else if (command == "report") {
      words >> text;
      std::cout << cushion_report(text.c_str()) << std::endl;
    } else if (command == "null") {
      std::cout << cushion_set_track(nullptr) << ' ' << cushion_mark(nullptr) << std::endl;
    } else if (command == "exec") {
      words >> text;
      execl(text.c_str(), text.c_str(), "30", static_cast<char*>(nullptr));
    } else if (command == "quit") {
      break;
    }
  }
  program.pause();
  program.go(true);
  for (Worker& worker : program.workers) {
    worker.thread.join();
    for (const auto& [block, size] : worker.blocks) {
      if (block != 0) program.failed += api.free(block) != CUDA_SUCCESS;
    }
  }
  for (const CUdeviceptr block : kept) program.failed += api.free(block) != CUDA_SUCCESS;
  std::cout << "failed " << program.failed << std::endl;
  return 17;
}
