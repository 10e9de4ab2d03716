/* The stateful part of a simulated CANN: devices, memory, streams, events, and callbacks to Python for graph capture.
 * Device memory is host memory. Every task runs when it is issued, so a stream is always idle unless Python reports that
 * it waits (a replay that waits for an external event).
 *
 * The prototypes are those of the vendor's headers inside the installed torch_npu wheel. Functions that are not
 * defined here return 0 (see build.py). Only this file is compiled; it includes the others.
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

/* ---- interface to Python ---- */

enum host_call {
    HOST_CALL_CAPTURE_BEGIN = 1,
    HOST_CALL_CAPTURE_END,
    HOST_CALL_CAPTURE_INFO,
    HOST_CALL_EXECUTE,
    HOST_CALL_DESTROY,
    HOST_CALL_GROUP_BEGIN,
    HOST_CALL_GROUP_END,
    HOST_CALL_UPDATE_BEGIN,
    HOST_CALL_UPDATE_END,
    HOST_CALL_EVENT_RECORD,
    HOST_CALL_EVENT_WAIT,
    HOST_CALL_SYNCHRONIZE,
    HOST_CALL_TRANSFER,
    HOST_CALL_QUERY,
    HOST_CALL_SYNCHRONIZE_EVENT,
    HOST_CALL_EVENT_DESTROY,
    HOST_CALL_VALUE_WRITE,
    HOST_CALL_VALUE_WAIT
};

typedef int (*host_call_t)(int what, void *a, void *b, void **out);

static host_call_t host_call;
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

/* Not 0 while a stream captures, updates or waits: only then do events and transfers call Python. */
int32_t simulator_attention;

/* Tasks in flight that the host has not waited for (ordering.py): while there are any, events and synchronizations also
 * call Python. */
int32_t simulator_watched;
uint64_t simulator_waits; /* how often the host synchronised */

static int must_call_host(void) { return simulator_attention || simulator_watched; }

void simulator_configure(const char *soc, uint32_t count, uint64_t bytes, int streams, host_call_t callback)
{
    snprintf(soc_name, sizeof soc_name, "%s", soc);
    devices = count < MAX_DEVICES ? count : MAX_DEVICES;
    capacity = bytes;
    host_call = callback;
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

#include "memory.c"
#include "streams.c"
#include "graphs.c"
