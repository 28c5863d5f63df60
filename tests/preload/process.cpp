// What processes and threads do around device memory: one scenario a run, named by the first argument. Each
// prints what it saw and ends with an exit code of its own, so that a code lost on the way is noticed.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <thread>

#include "driver_api.h"

namespace {

DriverApi load() {
  void* driver = open_driver();
  return by_elf_name([=](const char* name) { return dlsym(driver, name); });
}

void mute() {
  if (std::freopen("/dev/null", "w", stdout) == nullptr) _exit(98);
}

// The child's exit code, or 128 + the signal that ended it.
int wait_for(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

CUdeviceptr alloc(const DriverApi& api, std::size_t size) {
  CUdeviceptr block = 0;
  if (const CUresult result = api.alloc(&block, size); result != CUDA_SUCCESS)
    std::printf("alloc failed: %d\n", result);
  return block;
}

int allocate() {
  exercise(load());
  return 7;
}

// A context and no device allocation: an ordinary process to Cushion.
int context_only() {
  use_device(load());
  return 8;
}

int fork_before() {
  const pid_t child = fork();
  if (child == 0) {
    const DriverApi api = load();
    mute();
    exercise(api);
    std::exit(21);
  }
  std::printf("child: %d\n", wait_for(child));
  return allocate();
}

int fork_after() {
  const DriverApi api = load();
  use_device(api);
  const CUdeviceptr block = alloc(api, 4000);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) std::exit(22);  // exit handlers and all
  std::printf("child: %d\n", wait_for(child));
  std::printf("%s\n", bytes_survive(api, block, 4000, 9));
  std::printf("free: %d\n", api.free(block));
  return 10;
}

// A forked child cannot use CUDA: the driver answers 3. Nothing of ours may wait for a thread that is not there.
int fork_child_calls() {
  const DriverApi api = load();
  use_device(api);
  const CUdeviceptr block = alloc(api, 4000);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::exit(api.free(block));
  }
  std::printf("free in the child: %d\n", wait_for(child));
  std::printf("free: %d\n", api.free(block));
  return 11;
}

int exec_child(const char* self) {
  const DriverApi api = load();
  use_device(api);
  const CUdeviceptr block = alloc(api, 4000);
  for (const char* scenario : {"idle", "allocate"}) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      mute();
      execl(self, self, scenario, static_cast<char*>(nullptr));
      _exit(99);
    }
    std::printf("%s: %d\n", scenario, wait_for(child));
  }
  std::printf("free: %d\n", api.free(block));
  return 12;
}

// Threads that allocate, free what another thread allocated, and end; the last blocks are freed by main.
int threads() {
  const DriverApi api = load();
  use_device(api);
  CUcontext context = nullptr;
  api.primary_retain(&context, 0);
  constexpr int kThreads = 8, kBlocks = 50;
  std::vector<std::vector<CUdeviceptr>> blocks(kThreads);
  const auto in_threads = [&](auto body) {
    std::vector<std::thread> running;
    for (int t = 0; t < kThreads; ++t) {
      running.emplace_back([&, t] {
        api.set_current(context);
        body(t);
      });
    }
    for (std::thread& thread : running) thread.join();
  };
  in_threads([&](int t) {
    for (int i = 0; i < kBlocks; ++i)
      blocks[static_cast<std::size_t>(t)].push_back(alloc(api, 1000 + 500 * static_cast<std::size_t>(i)));
  });
  int failed[kThreads] = {};
  in_threads([&](int t) {
    std::vector<CUdeviceptr>& of_other = blocks[static_cast<std::size_t>((t + 1) % kThreads)];
    for (int i = 0; i < kBlocks - 5; ++i) {
      failed[t] += api.free(of_other.back()) != CUDA_SUCCESS;
      of_other.pop_back();
      CUdeviceptr block = 0;
      failed[t] += api.alloc_async(&block, 2000, nullptr) != CUDA_SUCCESS;
      failed[t] += api.free_async(block, nullptr) != CUDA_SUCCESS;
    }
  });
  int all = 0;
  for (int count : failed) all += count;
  for (std::vector<CUdeviceptr>& own : blocks)
    for (CUdeviceptr block : own) all += api.free(block) != CUDA_SUCCESS;
  std::printf("failed: %d\n", all);
  return 13;
}

// Threads come and go; each leaves a block to its successor, which frees it, and keeps another to its own end.
int many_threads() {
  const DriverApi api = load();
  use_device(api);
  CUcontext context = nullptr;
  api.primary_retain(&context, 0);
  constexpr int kThreads = 200;
  CUdeviceptr inherited = 0;
  int failed = 0;
  for (int i = 0; i < kThreads; ++i) {
    std::thread([&] {
      failed += api.set_current(context) != CUDA_SUCCESS;
      if (inherited != 0) failed += api.free(inherited) != CUDA_SUCCESS;
      const CUdeviceptr own = alloc(api, 100'000);
      inherited = alloc(api, 1000);
      failed += std::string(bytes_survive(api, own, 100'000, 5)) != "bytes kept";
      failed += api.free(own) != CUDA_SUCCESS;
    }).join();
  }
  failed += api.free(inherited) != CUDA_SUCCESS;
  std::printf("failed: %d\n", failed);
  return 17;
}

// What a thread keeps in thread-local storage is made and freed as late as the thread itself ends.
struct ThreadBlock {
  const DriverApi* api = nullptr;
  CUdeviceptr block = 0;
  ~ThreadBlock() {
    if (api == nullptr) return;
    std::printf("free: %d\n", api->free(block));
    CUdeviceptr late = 0;
    std::printf("alloc: %d", api->alloc(&late, 3000));
    std::printf(" free: %d\n", api->free(late));
  }
};
thread_local ThreadBlock thread_block;

int thread_local_destructor() {
  static const DriverApi api = load();
  use_device(api);
  CUcontext context = nullptr;
  api.primary_retain(&context, 0);
  std::thread([&] {
    api.set_current(context);
    thread_block = {&api, alloc(api, 4000)};
  }).join();
  thread_block = {&api, alloc(api, 4000)};  // main's own goes before the static destructors
  return 18;
}

// exit() by a thread, while main and others are allocating.
[[noreturn]] void exit_in_thread() {
  static const DriverApi api = load();
  use_device(api);
  CUcontext context = nullptr;
  api.primary_retain(&context, 0);
  std::fflush(stdout);
  for (int i = 0; i < 3; ++i) {
    std::thread([=] {
      api.set_current(context);
      for (int round = 0;; ++round) {
        CUdeviceptr block = 0;
        if (api.alloc(&block, 5000) == CUDA_SUCCESS) api.free(block);
        if (i == 0 && round == 1000) std::exit(19);
      }
    }).detach();
  }
  for (;;) pause();
}

// Whether Cushion is in this process.
int show_mapped() {
  bool mapped = false;
  char line[4096];
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  while (maps != nullptr && std::fgets(line, sizeof line, maps) != nullptr)
    mapped = mapped || std::strstr(line, "libcushion.so") != nullptr;
  if (maps != nullptr) std::fclose(maps);
  std::printf("%s\n", mapped ? "mapped" : "not mapped");
  return 20;
}

// main ends by pthread_exit; the process goes on, and ends when its last thread does.
[[noreturn]] void main_thread_exits() {
  static const DriverApi api = load();
  use_device(api);
  static const CUdeviceptr block = alloc(api, 4000);
  static CUcontext context = nullptr;
  api.primary_retain(&context, 0);
  static const pthread_t main_thread = pthread_self();
  std::thread([] {
    pthread_join(main_thread, nullptr);
    api.set_current(context);
    std::printf("free: %d\n", api.free(block));
    exercise_memory(api);
    std::printf("done\n");
    std::exit(0);  // the driver's own threads would keep the process
  }).detach();
  pthread_exit(nullptr);
}

int unload(const char* plugin_path, int flags) {
  const DriverApi api = load();
  void* plugin = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL | flags);
  require(plugin, "the plugin");
  auto plugin_alloc = reinterpret_cast<CUdeviceptr (*)()>(dlsym(plugin, "plugin_alloc"));
  require(plugin_alloc, "plugin_alloc");
  const CUdeviceptr block = plugin_alloc();
  std::printf("unloaded: %d\n", dlclose(plugin));
  std::printf("%s\n", bytes_survive(api, block, 5000, 4));
  std::printf("free: %d\n", api.free(block));
  exercise_memory(api);
  return 14;
}

// A library whose static object holds device memory is loaded and unloaded twice.
int unload_static(const char* plugin_path) {
  const DriverApi api = load();
  use_device(api);
  for (int i = 0; i < 2; ++i) {
    void* plugin = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL);
    require(plugin, "the plugin");
    std::printf("unloaded: %d\n", dlclose(plugin));
    exercise_memory(api);
  }
  return 21;
}

// Waits for a signal, a deadly one.
int wait_for_signal() {
  const DriverApi api = load();
  use_device(api);
  alloc(api, 4000);
  std::printf("ready\n");
  std::fflush(stdout);
  sleep(10);
  return 16;
}

// Which libraries of LD_PRELOAD a child still gets.
int show_preload() {
  const char* preload = std::getenv("LD_PRELOAD");
  std::printf("LD_PRELOAD=%s\n", preload != nullptr ? preload : "");
  return 15;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string scenario = argc > 1 ? argv[1] : "";
  if (scenario == "idle") return 6;
  if (scenario == "allocate") return allocate();
  if (scenario == "context_only") return context_only();
  if (scenario == "fork_before") return fork_before();
  if (scenario == "fork_after") return fork_after();
  if (scenario == "fork_child_calls") return fork_child_calls();
  if (scenario == "exec_child") return exec_child(argv[0]);
  if (scenario == "threads") return threads();
  if (scenario == "many_threads") return many_threads();
  if (scenario == "thread_local_destructor") return thread_local_destructor();
  if (scenario == "exit_in_thread") exit_in_thread();
  if (scenario == "show_mapped") return show_mapped();
  if (scenario == "main_thread_exits") main_thread_exits();
  if (scenario == "unload" && argc > 2) return unload(argv[2], 0);
  if (scenario == "unload_static" && argc > 2) return unload_static(argv[2]);
  if (scenario == "unload_deepbind" && argc > 2) return unload(argv[2], RTLD_DEEPBIND);
  if (scenario == "wait_for_signal") return wait_for_signal();
  if (scenario == "show_preload") return show_preload();
  std::fprintf(stderr, "unknown scenario: %s\n", scenario.c_str());
  return 64;
}
