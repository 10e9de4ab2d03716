/* The part of a simulated CANN that keeps state: devices, memory, streams, events, and the doors through which graph
 * capture reaches Python. Device memory is host memory. Every task runs when it is issued, so a stream is always idle
 * unless Python says that it waits (a replay that waits for an external event).
 *
 * The prototypes are those of the vendor's headers inside the installed torch_npu wheel. What is not defined here
 * becomes a function that returns 0 (see build.py).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "acl/acl.h"
#include "acl/acl_mdl.h"
#include "acl/acl_op_compiler.h"
#include "acl/acl_rt.h"
#include "acl/error_codes/rt_error_codes.h"

#define MAX_DEVICES 64
#define MESSAGE 1024

/* ---- what Python sets and reads ---- */

enum door {
    DOOR_CAPTURE_BEGIN = 1,
    DOOR_CAPTURE_END,
    DOOR_CAPTURE_INFO,
    DOOR_EXECUTE,
    DOOR_DESTROY,
    DOOR_GROUP_BEGIN,
    DOOR_GROUP_END,
    DOOR_UPDATE_BEGIN,
    DOOR_UPDATE_END,
    DOOR_EVENT_RECORD,
    DOOR_EVENT_WAIT,
    DOOR_SYNCHRONIZE,
    DOOR_TRANSFER,
    DOOR_QUERY,
    DOOR_SYNCHRONIZE_EVENT,
    DOOR_EVENT_DESTROY,
    DOOR_VALUE_WRITE,
    DOOR_VALUE_WAIT
};

typedef int (*door_t)(int what, void *a, void *b, void **out);

static door_t door;
static char soc_name[64] = "Ascend910B3";
static uint32_t devices = 1;
static size_t capacity;
static size_t used[MAX_DEVICES];
static size_t peak[MAX_DEVICES];
static size_t reserved[MAX_DEVICES]; /* taken by somebody else: another process, a communication buffer */
static int broken[MAX_DEVICES];      /* the sticky error of a device */
static char messages[MAX_DEVICES][MESSAGE];
static int streams_left[MAX_DEVICES];
static uint64_t operator_timeout; /* microseconds until a kernel that does not end is an error, 0: never */

/* Not 0 while a stream captures, updates or waits: only then do events and transfers ask Python. */
int32_t simulator_attention;

void simulator_configure(const char *soc, uint32_t count, uint64_t bytes, int streams, door_t callback)
{
    snprintf(soc_name, sizeof soc_name, "%s", soc);
    devices = count < MAX_DEVICES ? count : MAX_DEVICES;
    capacity = bytes;
    door = callback;
    for (uint32_t i = 0; i < MAX_DEVICES; i++)
        streams_left[i] = streams;
}

void simulator_break(int32_t device, int code, const char *message)
{
    broken[device] = code;
    snprintf(messages[device], MESSAGE, "%s", message);
}

void simulator_message(int32_t device, const char *message) { snprintf(messages[device], MESSAGE, "%s", message); }
int simulator_broken(int32_t device) { return broken[device]; }
void simulator_reserve(int32_t device, uint64_t bytes) { reserved[device] = bytes; }
uint64_t simulator_used(int32_t device) { return used[device]; }
uint64_t simulator_peak(int32_t device) { return peak[device]; }
int simulator_streams_left(int32_t device) { return streams_left[device]; }
void simulator_set_streams_left(int32_t device, int count) { streams_left[device] = count; }

uint64_t simulator_operator_timeout(void) { return operator_timeout; }

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual)
{
    operator_timeout = timeout;
    if (actual)
        *actual = timeout;
    return 0;
}

/* ---- devices ---- */

static __thread int32_t current;
static int contexts[MAX_DEVICES];

static aclError health(void) { return broken[current]; }

aclError aclInit(const char *path) { return 0; }
aclError aclFinalize(void) { return 0; }
const char *aclGetRecentErrMsg(void) { return messages[current]; }
void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {}
const char *aclrtGetSocName(void) { return soc_name; }

aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = devices;
    return 0;
}

aclError aclrtSetDevice(int32_t device)
{
    if (device < 0 || (uint32_t)device >= devices)
        return ACL_ERROR_RT_INVALID_DEVICEID;
    current = device;
    return 0;
}

aclError aclrtGetDevice(int32_t *device)
{
    *device = current;
    return 0;
}

aclError aclrtResetDevice(int32_t device) { return 0; }

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    *context = &contexts[current];
    return 0;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    current = (int32_t)((int *)context - contexts);
    return 0;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    *can = 1;
    return 0;
}

aclError aclrtDeviceGetBareTgid(int32_t *pid)
{
    *pid = (int32_t)getpid();
    return 0;
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo what, int64_t *value)
{
    *value = 20;
    return 0;
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value)
{
    *value = 20;
    return 0;
}

/* Cores of the matrix and the vector units: those of one 910B die, for every generation. */
aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value)
{
    *value = type == ACL_RT_DEV_RES_CUBE_CORE ? 24 : 48;
    return 0;
}

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value)
{
    return aclrtGetDeviceResLimit(0, type, value);
}

aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value)
{
    return aclrtGetDeviceResLimit(0, type, value);
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid)
{
    memset(uuid, 0, sizeof *uuid);
    snprintf((char *)uuid, sizeof *uuid, "simulated %d", device);
    return 0;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    if (flags)
        *flags = 0;
    *active = 1;
    return 0;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic)
{
    *logic = user;
    return 0;
}

/* ---- memory ---- */

enum kind { DEVICE, HOST, MAPPED };
struct block {
    char *start;
    size_t size;
    int32_t device;
    enum kind kind;
};

static pthread_mutex_t memory = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static size_t block_count, block_room;

/* The index of the first block that starts after p. */
static size_t after(const char *p)
{
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start > p)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int add_block(void *start, size_t size, enum kind kind, int32_t device)
{
    if (block_count == block_room) {
        size_t room = block_room ? block_room * 2 : 256;
        struct block *grown = realloc(blocks, room * sizeof *blocks);
        if (!grown)
            return 0;
        blocks = grown;
        block_room = room;
    }
    size_t at = after(start);
    memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
    blocks[at] = (struct block){start, size, device, kind};
    block_count++;
    return 1;
}

static int take_block(void *start, struct block *taken)
{
    size_t at = after(start);
    if (!at || blocks[at - 1].start != (char *)start)
        return 0;
    *taken = blocks[--at];
    memmove(blocks + at, blocks + at + 1, (block_count - at - 1) * sizeof *blocks);
    block_count--;
    return 1;
}

/* 1 when the whole range lies in memory that this process holds on a device. */
int simulator_is_live(const char *start, uint64_t size)
{
    pthread_mutex_lock(&memory);
    int live = 0;
    while (1) {
        size_t at = after(start);
        if (!at)
            break;
        struct block *block = &blocks[at - 1];
        if (block->kind == HOST || start >= block->start + block->size)
            break;
        uint64_t here = (uint64_t)(block->start + block->size - start);
        if (here >= size) {
            live = 1;
            break;
        }
        start += here; /* expandable segments: a tensor may span mappings */
        size -= here;
    }
    pthread_mutex_unlock(&memory);
    return live;
}

static aclError account(size_t size)
{
    if (used[current] + reserved[current] + size > capacity) {
        snprintf(messages[current], MESSAGE, "simulated device %d: %zu bytes asked, %zu of %zu in use", current, size,
                 used[current] + reserved[current], capacity);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    used[current] += size;
    if (used[current] > peak[current])
        peak[current] = used[current];
    return 0;
}

static aclError take_memory(void **out, size_t size)
{
    if (health())
        return health();
    size = (size + 511) / 512 * 512;
    if (!size)
        size = 512;
    pthread_mutex_lock(&memory);
    aclError error = account(size);
    if (!error) {
        void *start =
            mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED || !add_block(start, size, DEVICE, current)) {
            if (start != MAP_FAILED)
                munmap(start, size);
            used[current] -= size;
            error = ACL_ERROR_RT_MEMORY_ALLOCATION;
        } else
            *out = start;
    }
    pthread_mutex_unlock(&memory);
    return error;
}

aclError aclrtMalloc(void **out, size_t size, aclrtMemMallocPolicy policy) { return take_memory(out, size); }
aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) { return take_memory(out, size); }
aclError aclrtMallocWithCfg(void **out, size_t size, aclrtMemMallocPolicy policy, aclrtMallocConfig *config)
{
    return take_memory(out, size);
}

aclError aclrtFree(void *start)
{
    struct block block;
    pthread_mutex_lock(&memory);
    int found = take_block(start, &block);
    if (found) {
        munmap(block.start, block.size);
        used[block.device] -= block.size;
    }
    pthread_mutex_unlock(&memory);
    return found ? 0 : ACL_ERROR_RT_PARAM_INVALID;
}

static aclError take_host(void **out, size_t size)
{
    if (posix_memalign(out, 4096, size ? size : 1))
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&memory);
    int added = add_block(*out, size ? size : 1, HOST, current);
    pthread_mutex_unlock(&memory);
    if (!added)
        free(*out);
    return added ? 0 : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtMallocHost(void **out, size_t size) { return take_host(out, size); }
aclError aclrtMallocHostWithCfg(void **out, uint64_t size, aclrtMallocConfig *config) { return take_host(out, size); }

aclError aclrtFreeHost(void *start)
{
    struct block block;
    pthread_mutex_lock(&memory);
    int found = take_block(start, &block);
    pthread_mutex_unlock(&memory);
    if (!found)
        return ACL_ERROR_RT_PARAM_INVALID;
    free(start);
    return 0;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    pthread_mutex_lock(&memory);
    size_t at = after(pointer);
    if (at && (char *)pointer < blocks[at - 1].start + blocks[at - 1].size) {
        attributes->location.id = (uint32_t)blocks[at - 1].device;
        attributes->location.type =
            blocks[at - 1].kind == HOST ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
    }
    pthread_mutex_unlock(&memory);
    return 0;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total)
{
    size_t taken = used[current] + reserved[current];
    *available = taken < capacity ? capacity - taken : 0;
    *total = capacity;
    return 0;
}

/* Expandable segments: addresses are reserved, physical memory is taken and mapped into them. */
struct physical {
    size_t size;
    int32_t device;
};

aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected, uint64_t flags)
{
    void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    *out = start;
    return 0;
}

aclError aclrtReleaseMemAddress(void *start) { return 0; } /* the addresses are not used again */

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *wanted, uint64_t flags)
{
    if (health())
        return health();
    pthread_mutex_lock(&memory);
    aclError error = account(size);
    pthread_mutex_unlock(&memory);
    if (error)
        return error;
    struct physical *physical = malloc(sizeof *physical);
    *physical = (struct physical){size, current};
    *handle = (aclrtDrvMemHandle)physical;
    return 0;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    struct physical *physical = (struct physical *)handle;
    pthread_mutex_lock(&memory);
    used[physical->device] -= physical->size;
    pthread_mutex_unlock(&memory);
    free(physical);
    return 0;
}

aclError aclrtMapMem(void *start, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags)
{
    struct physical *physical = (struct physical *)handle;
    if (mprotect(start, size, PROT_READ | PROT_WRITE))
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&memory);
    int added = add_block(start, size, MAPPED, physical->device);
    pthread_mutex_unlock(&memory);
    return added ? 0 : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtUnmapMem(void *start)
{
    struct block block;
    pthread_mutex_lock(&memory);
    int found = take_block(start, &block);
    pthread_mutex_unlock(&memory);
    if (!found)
        return ACL_ERROR_RT_PARAM_INVALID;
    madvise(start, block.size, MADV_DONTNEED);
    mprotect(start, block.size, PROT_NONE);
    return 0;
}

static aclError transfer(aclrtMemcpyKind kind, void *stream)
{
    if (health())
        return health();
    if (simulator_attention)
        return door(DOOR_TRANSFER, (void *)(intptr_t)kind, stream, NULL);
    return 0;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind)
{
    aclError error = transfer(kind, NULL);
    if (error)
        return error;
    if (size > room)
        return ACL_ERROR_RT_PARAM_INVALID;
    memmove(to, from, size);
    return 0;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream)
{
    aclError error = transfer(kind, stream);
    if (error)
        return error;
    if (size > room)
        return ACL_ERROR_RT_PARAM_INVALID;
    memmove(to, from, size);
    return 0;
}

aclError aclrtMemset(void *start, size_t room, int32_t value, size_t size)
{
    if (health())
        return health();
    memset(start, value, size);
    return 0;
}

aclError aclrtMemsetAsync(void *start, size_t room, int32_t value, size_t size, aclrtStream stream)
{
    return aclrtMemset(start, room, value, size);
}

/* ---- streams ---- */

struct stream {
    int32_t device;
    int32_t id;
};

static int32_t stream_count;

aclError aclrtCreateStreamWithConfig(aclrtStream *out, uint32_t priority, uint32_t flag)
{
    pthread_mutex_lock(&memory);
    int left = streams_left[current];
    if (left > 0)
        streams_left[current]--;
    int32_t id = stream_count++;
    pthread_mutex_unlock(&memory);
    if (left <= 0)
        return ACL_ERROR_RT_NO_STREAM_RESOURCE;
    struct stream *stream = malloc(sizeof *stream);
    *stream = (struct stream){current, id};
    *out = stream;
    return 0;
}

aclError aclrtCreateStream(aclrtStream *out) { return aclrtCreateStreamWithConfig(out, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream)
{
    if (stream) {
        pthread_mutex_lock(&memory);
        streams_left[((struct stream *)stream)->device]++;
        pthread_mutex_unlock(&memory);
    }
    free(stream);
    return 0;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t *id)
{
    *id = stream ? ((struct stream *)stream)->id : -1;
    return 0;
}

static aclError synchronize(void *stream, int32_t timeout)
{
    if (health())
        return health();
    if (simulator_attention) {
        aclError error = door(DOOR_SYNCHRONIZE, stream, (void *)(intptr_t)timeout, NULL);
        if (error)
            return error;
    }
    return health();
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream, -1); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) { return synchronize(stream, timeout); }
aclError aclrtSynchronizeDevice(void) { return synchronize(NULL, -1); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return synchronize(NULL, timeout); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status)
{
    if (health())
        return health();
    *status = simulator_attention && door(DOOR_QUERY, stream, NULL, NULL) ? ACL_STREAM_STATUS_NOT_READY
                                                                           : ACL_STREAM_STATUS_COMPLETE;
    return 0;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *arguments)
{
    function(arguments);
    return 0;
}

/* ---- events ---- */

struct event {
    uint32_t flag;
    void *stream; /* where it was last recorded */
    struct timespec when;
};

aclError aclrtCreateEventExWithFlag(aclrtEvent *out, uint32_t flag)
{
    struct event *event = calloc(1, sizeof *event);
    event->flag = flag;
    *out = event;
    return 0;
}

aclError aclrtCreateEventWithFlag(aclrtEvent *out, uint32_t flag) { return aclrtCreateEventExWithFlag(out, flag); }
aclError aclrtCreateEvent(aclrtEvent *out) { return aclrtCreateEventExWithFlag(out, 0); }

/* An event may tie a second stream to a capture. */
static aclError event_task(enum door what, aclrtEvent event, aclrtStream stream)
{
    return simulator_attention ? door(what, event, stream, NULL) : 0;
}

aclError aclrtDestroyEvent(aclrtEvent event)
{
    event_task(DOOR_EVENT_DESTROY, event, NULL);
    free(event);
    return 0;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream)
{
    struct event *event = handle;
    if (health())
        return health();
    event->stream = stream;
    clock_gettime(CLOCK_MONOTONIC, &event->when);
    return event_task(DOOR_EVENT_RECORD, handle, stream);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) { return event_task(DOOR_EVENT_WAIT, event, stream); }
aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t timeout)
{
    return aclrtStreamWaitEvent(stream, event);
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return 0; }

/* torch_npu makes external events, which reach into graphs, of words in device memory. */
struct word {
    uint64_t *address;
    uint64_t value;
    uint64_t mode;
};

aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream)
{
    struct word word = {address, value, flag};
    return health() ? health() : door(DOOR_VALUE_WRITE, &word, stream, NULL);
}

aclError aclrtValueWait(void *address, uint64_t value, uint32_t mode, aclrtStream stream)
{
    struct word word = {address, value, mode};
    return health() ? health() : door(DOOR_VALUE_WAIT, &word, stream, NULL);
}

static aclError synchronize_event(aclrtEvent handle, int32_t timeout)
{
    if (health())
        return health();
    if (simulator_attention) {
        aclError error = door(DOOR_SYNCHRONIZE_EVENT, ((struct event *)handle)->stream, (void *)(intptr_t)timeout, NULL);
        if (error)
            return error;
    }
    return health();
}

aclError aclrtSynchronizeEvent(aclrtEvent event) { return synchronize_event(event, -1); }
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout) { return synchronize_event(event, timeout); }

static int event_done(aclrtEvent handle)
{
    struct event *event = handle;
    return !(simulator_attention && event->stream && door(DOOR_QUERY, event->stream, NULL, NULL));
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    if (health())
        return health();
    *status = event_done(event) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return 0;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)
{
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return 0;
}

aclError aclrtQueryEvent(aclrtEvent event, aclrtEventStatus *status)
{
    *status = event_done(event) ? ACL_EVENT_STATUS_COMPLETE : ACL_EVENT_STATUS_NOT_READY;
    return 0;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent first, aclrtEvent last)
{
    struct timespec *a = &((struct event *)first)->when, *b = &((struct event *)last)->when;
    *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) / 1e6);
    return 0;
}

/* ---- graphs: all of it lives in Python (graphs.py) ---- */

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode)
{
    return health() ? health() : door(DOOR_CAPTURE_BEGIN, stream, (void *)(intptr_t)mode, NULL);
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) { return door(DOOR_CAPTURE_END, stream, NULL, model); }

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model)
{
    void *found = NULL;
    int state = simulator_attention ? door(DOOR_CAPTURE_INFO, stream, NULL, &found) : 0;
    if (status)
        *status = state;
    if (model)
        *model = found;
    return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream)
{
    return health() ? health() : door(DOOR_EXECUTE, model, stream, NULL);
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode)
{
    static __thread aclmdlRICaptureMode held;
    aclmdlRICaptureMode was = held;
    held = *mode;
    *mode = was;
    return 0;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id)
{
    *id = (uint32_t)(uintptr_t)model; /* the graph's number */
    return 0;
}

aclError aclmdlRIDestroy(aclmdlRI model) { return door(DOOR_DESTROY, model, NULL, NULL); }
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) { return door(DOOR_GROUP_BEGIN, stream, NULL, NULL); }

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle)
{
    return door(DOOR_GROUP_END, stream, NULL, handle);
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle)
{
    return door(DOOR_UPDATE_BEGIN, stream, handle, NULL);
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) { return door(DOOR_UPDATE_END, stream, NULL, NULL); }

/* ---- operators ---- */

aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return 0; }
size_t aclGetCompileoptSize(aclCompileOpt option) { return 16; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length)
{
    snprintf(value, length, "0");
    return 0;
}

/* An operator that reaches the vendor's kernel was not taken over: it must fail, not yield zeros. */
static aclError nobody(const char *type)
{
    snprintf(messages[current], MESSAGE, "the NPU simulator has no kernel for %s", type ? type : "this operator");
    return ACL_ERROR_OP_NOT_FOUND;
}

aclError aclopCompileAndExecute(const char *type, int inputs, const aclTensorDesc *const input_types[],
                                const aclDataBuffer *const input[], int outputs,
                                const aclTensorDesc *const output_types[], aclDataBuffer *const output[],
                                const aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile,
                                const char *path, aclrtStream stream)
{
    return nobody(type);
}

aclError aclopCompileAndExecuteV2(const char *type, int inputs, aclTensorDesc *input_types[], aclDataBuffer *input[],
                                  int outputs, aclTensorDesc *output_types[], aclDataBuffer *output[],
                                  aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile,
                                  const char *path, aclrtStream stream)
{
    return nobody(type);
}

/* Names that the wheel still looks up, in older headers only. */
aclError aclQueryEventRecordedStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    return aclrtQueryEventStatus(event, status);
}

aclError aclQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)
{
    return aclrtQueryEventWaitStatus(event, status);
}
