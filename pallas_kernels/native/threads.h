// Fork and join over a few threads.
#pragma once

// Takes pieces of work from a counter of its own until none is left.
typedef void (*Job)(void *context);

// Runs a job on this thread and on those workers that come in time; alone where another call has the workers.
//
// A worker that has not begun is never waited for: with all cores busy that would take a time slice of the scheduler, some
// 10 ms. The caller takes any piece that no other thread has taken, closes the job, and waits for workers inside only.
void run_job(Job job, void *context);

// Number of threads, the caller's included; takes effect with the next job.
void set_num_threads(int count);
int num_threads(void);
