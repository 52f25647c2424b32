/* Kernels in several threads. */
#define _GNU_SOURCE
#include "kernels.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Runs in each thread of OpenMP's pool. Relaxed order is enough: the additions alone hand out disjoint items. */
void rayrec_take_part(void *arguments) {
    rayrec_work *work = arguments;
    for (;;) {
        const int64_t start = __atomic_fetch_add(&work->next, work->at_once, __ATOMIC_RELAXED);
        if (start >= work->count) return;
        const int64_t stop = work->count - start < work->at_once ? work->count : start + work->at_once;
        if (work->kernel(work->arguments, start, stop)) __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
    }
}

void rayrec_add_thread_id(void *arguments) {
    rayrec_team *team = arguments;
    const int64_t place = __atomic_fetch_add(&team->count, 1, __ATOMIC_RELAXED);
    if (place < team->capacity) team->ids[place] = (int64_t)syscall(SYS_gettid);
}
