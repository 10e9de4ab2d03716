/* Streams and events. Included by runtime.c. */

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
    __atomic_add_fetch(&simulator_waits, 1, __ATOMIC_RELAXED);
    if (must_call_host()) {
        aclError error = host_call(HOST_CALL_SYNCHRONIZE, stream, (void *)(intptr_t)timeout, NULL);
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
    *status = must_call_host() && host_call(HOST_CALL_QUERY, stream, NULL, NULL) ? ACL_STREAM_STATUS_NOT_READY
                                                                           : ACL_STREAM_STATUS_COMPLETE;
    return 0;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *arguments)
{
    function(arguments);
    return 0;
}

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

/* An event may join a second stream to a capture, and orders tasks in flight. */
static aclError event_task(enum host_call what, aclrtEvent event, aclrtStream stream)
{
    return must_call_host() ? host_call(what, event, stream, NULL) : 0;
}

aclError aclrtDestroyEvent(aclrtEvent event)
{
    event_task(HOST_CALL_EVENT_DESTROY, event, NULL);
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
    return event_task(HOST_CALL_EVENT_RECORD, handle, stream);
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) { return event_task(HOST_CALL_EVENT_WAIT, event, stream); }
aclError aclrtStreamWaitEventWithTimeout(aclrtStream stream, aclrtEvent event, int32_t timeout)
{
    return aclrtStreamWaitEvent(stream, event);
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) { return 0; }

/* torch_npu implements external events, which graphs wait for, as words in device memory. */
struct word {
    uint64_t *address;
    uint64_t value;
    uint64_t mode;
};

aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream)
{
    struct word word = {address, value, flag};
    return health() ? health() : host_call(HOST_CALL_VALUE_WRITE, &word, stream, NULL);
}

aclError aclrtValueWait(void *address, uint64_t value, uint32_t mode, aclrtStream stream)
{
    struct word word = {address, value, mode};
    return health() ? health() : host_call(HOST_CALL_VALUE_WAIT, &word, stream, NULL);
}

static aclError synchronize_event(aclrtEvent handle, int32_t timeout)
{
    if (health())
        return health();
    __atomic_add_fetch(&simulator_waits, 1, __ATOMIC_RELAXED);
    if (must_call_host()) {
        aclError error = host_call(HOST_CALL_SYNCHRONIZE_EVENT, handle, ((struct event *)handle)->stream, NULL);
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
    return !(must_call_host() && event->stream && host_call(HOST_CALL_QUERY, event->stream, handle, NULL));
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
