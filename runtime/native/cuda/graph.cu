// graph.cu: operations recorded once and queued again by one call: a stream capture, made executable.
#include "device.cuh"
#include "operations.h"

#include <memory>

struct pi_gpu_graph {
    cudaGraphExec_t executable;
    uint64_t n_launches;
};

namespace pi_cuda {
namespace {

uint64_t free_device_bytes() {
    size_t free_bytes = 0, total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for free memory");
    return free_bytes;
}

// Adds to gpu.graph_bytes what the action takes of the device's memory, or takes off what it gives back.
template <typename Action>
void measured(pi_gpu &gpu, const Action &action) {
    const uint64_t before = free_device_bytes();
    action();
    const uint64_t after = free_device_bytes();
    const uint64_t given_back = after > before ? after - before : 0;
    gpu.graph_bytes += before > after ? before - after : 0;
    gpu.graph_bytes -= given_back < gpu.graph_bytes ? given_back : gpu.graph_bytes;
}

void destroy(pi_gpu &gpu, pi_gpu_graph *graph) {
    check(cudaStreamSynchronize(gpu.stream), "waiting for the device");
    measured(gpu, [&] { cudaGraphExecDestroy(graph->executable); });
    delete graph;
    --gpu.n_graphs;
}

struct DestroyRecording {
    void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};

pi_gpu_graph *make_executable(pi_gpu &gpu, cudaGraph_t recording, uint64_t n_launches) {
    auto graph = std::make_unique<pi_gpu_graph>();
    graph->n_launches = n_launches;
    cudaError_t uploaded = cudaSuccess;
    measured(gpu, [&] {
        check(cudaGraphInstantiateWithFlags(&graph->executable, recording, 0), "making a graph");
        ++gpu.n_graphs;
        uploaded = cudaGraphUpload(graph->executable, gpu.stream); // takes what the first launch would
        if (uploaded == cudaSuccess)
            uploaded = cudaStreamSynchronize(gpu.stream);
    });
    const uint64_t taken = gpu.graph_bytes;
    if (uploaded == cudaSuccess && taken <= gpu.graph_limit_bytes)
        return graph.release();
    destroy(gpu, graph.release());
    check(uploaded, "uploading a graph");
    throw Failure{PI_DOES_NOT_FIT, "graphs would take " + std::to_string(taken) + " bytes of the " +
                                       std::to_string(gpu.graph_limit_bytes) + " kept for them"};
}

} // namespace

int32_t begin_capture(pi_gpu *gpu) {
    return operate(gpu, [&](pi_gpu &device) {
        require_no_capture(device, "recording");
        check(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), "recording a graph");
        device.capturing = true;
        device.launches_before = device.n_launches;
    });
}

int32_t end_capture(pi_gpu *gpu, pi_gpu_graph **out) {
    return operate(gpu, [&](pi_gpu &device) {
        if (!device.capturing)
            throw Failure{PI_FAILURE, "no graph is being recorded"};
        device.capturing = false;
        const uint64_t recorded = device.n_launches - device.launches_before;
        device.n_launches = device.launches_before;
        cudaGraph_t recording = nullptr;
        const cudaError_t result = cudaStreamEndCapture(device.stream, &recording);
        const std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyRecording> owner(recording);
        if (result != cudaSuccess)
            static_cast<void>(cudaGetLastError()); // told below, or of no interest
        if (out == nullptr)
            return;
        *out = nullptr;
        check(result, "recording a graph");
        *out = make_executable(device, recording, recorded);
    });
}

int32_t launch_graph(pi_gpu *gpu, pi_gpu_graph *graph) {
    return operate(gpu, [&](pi_gpu &device) {
        require_no_capture(device, "launching a graph");
        check(cudaGraphLaunch(graph->executable, device.stream), "launching a graph");
        device.n_launches += graph->n_launches;
    });
}

int32_t release_graph(pi_gpu *gpu, pi_gpu_graph *graph) {
    return operate(gpu, [&](pi_gpu &device) {
        require_no_capture(device, "releasing a graph");
        destroy(device, graph);
    });
}

} // namespace pi_cuda
