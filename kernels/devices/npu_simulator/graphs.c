/* Graphs, implemented in Python (graphs.py), and operators that are not replaced. Included by runtime.c. */

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode)
{
    return health() ? health() : host_call(HOST_CALL_CAPTURE_BEGIN, stream, (void *)(intptr_t)mode, NULL);
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *model) { return host_call(HOST_CALL_CAPTURE_END, stream, NULL, model); }

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model)
{
    void *found = NULL;
    int state = simulator_attention ? host_call(HOST_CALL_CAPTURE_INFO, stream, NULL, &found) : 0;
    if (status)
        *status = state;
    if (model)
        *model = found;
    return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream stream)
{
    return health() ? health() : host_call(HOST_CALL_EXECUTE, model, stream, NULL);
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

aclError aclmdlRIDestroy(aclmdlRI model) { return host_call(HOST_CALL_DESTROY, model, NULL, NULL); }
aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream) { return host_call(HOST_CALL_GROUP_BEGIN, stream, NULL, NULL); }

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle)
{
    return host_call(HOST_CALL_GROUP_END, stream, NULL, handle);
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle)
{
    return host_call(HOST_CALL_UPDATE_BEGIN, stream, handle, NULL);
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream) { return host_call(HOST_CALL_UPDATE_END, stream, NULL, NULL); }

aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return 0; }
size_t aclGetCompileoptSize(aclCompileOpt option) { return 16; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length)
{
    snprintf(value, length, "0");
    return 0;
}

/* An operator that reaches the vendor's kernel was not replaced: it must fail, not return zeros. */
static aclError no_kernel(const char *type)
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
    return no_kernel(type);
}

aclError aclopCompileAndExecuteV2(const char *type, int inputs, aclTensorDesc *input_types[], aclDataBuffer *input[],
                                  int outputs, aclTensorDesc *output_types[], aclDataBuffer *output[],
                                  aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile,
                                  const char *path, aclrtStream stream)
{
    return no_kernel(type);
}

/* Names of older headers that the wheel still resolves. */
aclError aclQueryEventRecordedStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    return aclrtQueryEventStatus(event, status);
}

aclError aclQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status)
{
    return aclrtQueryEventWaitStatus(event, status);
}
