#define _GNU_SOURCE
#include "threads.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

// A worker spins for about 100 us before it sleeps: calls of a decode step come 10 to 500 us apart, and waking a sleeper
// takes some 45 us on a virtual machine.
enum { WORKER_SPINS = 8000, CALLER_SPINS = 4000, MOST_THREADS = 256 };

static struct {
  _Alignas(64) atomic_uint newest;  // number of the newest job
  _Alignas(64) atomic_uint open;    // the same while workers may begin it, else 0
  _Alignas(64) atomic_int inside;   // workers in the job
  _Alignas(64) atomic_int sleepers;
  _Alignas(64) atomic_flag taken;   // some caller has the workers
  _Alignas(64) atomic_int wanted;   // threads, the caller included
  pid_t owner;                      // a forked child has no workers
  int started;
  Job job;
  void *context;
} pool = {.taken = ATOMIC_FLAG_INIT, .wanted = 1};

static long futex(atomic_uint *word, int operation, unsigned value) {
  return syscall(SYS_futex, word, operation, value, 0, 0, 0);
}

static void *work(void *argument) {
  int index = (int)(long)argument;
  unsigned seen = 0;
  for (;;) {
    unsigned now;
    for (int spins = 0; (now = atomic_load_explicit(&pool.newest, memory_order_acquire)) == seen;) {
      if (++spins < WORKER_SPINS) {
        _mm_pause();
        continue;
      }
      atomic_fetch_add(&pool.sleepers, 1);
      futex(&pool.newest, FUTEX_WAIT_PRIVATE, seen);
      atomic_fetch_sub(&pool.sleepers, 1);
      spins = 0;
    }
    seen = now;
    if (index >= atomic_load_explicit(&pool.wanted, memory_order_relaxed)) continue;
    atomic_fetch_add(&pool.inside, 1);
    if (atomic_load(&pool.open) == seen) pool.job(pool.context);
    atomic_fetch_sub(&pool.inside, 1);
  }
  return 0;
}

// Called by the owner of the pool. Threads are started when they are first wanted; what cannot be started is done without.
static void start_workers(int count) {
  if (pool.owner != getpid()) {
    pool.owner = getpid();
    pool.started = 1;
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.sleepers, 0);
  }
  for (; pool.started < count; pool.started++) {
    pthread_t thread;
    if (pthread_create(&thread, 0, work, (void *)(long)pool.started)) return;
    pthread_detach(thread);
  }
}

void set_num_threads(int count) {
  atomic_store(&pool.wanted, count < 1 ? 1 : count > MOST_THREADS ? MOST_THREADS : count);
}

int num_threads(void) { return atomic_load(&pool.wanted); }

void run_job(Job job, void *context) {
  int count = num_threads();
  if (count == 1 || atomic_flag_test_and_set(&pool.taken)) {
    job(context);
    return;
  }
  start_workers(count);
  pool.job = job;
  pool.context = context;
  unsigned number = atomic_load(&pool.newest) + 1;
  if (number == 0) number = 1;  // 0 means closed
  atomic_store(&pool.open, number);
  atomic_store(&pool.newest, number);
  if (atomic_load(&pool.sleepers)) futex(&pool.newest, FUTEX_WAKE_PRIVATE, MOST_THREADS);
  job(context);
  atomic_store(&pool.open, 0);
  for (int spins = 0; atomic_load(&pool.inside); spins++) {
    if (spins < CALLER_SPINS) _mm_pause();
    else sched_yield();  // others may need the core, this worker among them
  }
  atomic_flag_clear(&pool.taken);
}
