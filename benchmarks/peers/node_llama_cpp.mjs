// The node-llama-cpp side of compare_llamacpp.py: node node_llama_cpp.mjs MODEL THREADS PROMPT DECODE VOCABULARY
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const modelPath = process.argv[2];
const [threads, nPrompt, nDecode, nVocab] = process.argv.slice(3).map(Number);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads});
const model = await llama.loadModel({modelPath});
const contextSize = nPrompt + nDecode + 64;
const context = await model.createContext({contextSize, threads, batchSize: 512, sequences: 1});
const sequence = context.getSequence();

// As prompt_tokens() of compare_llamacpp.py: ids that no earlier run has cached.
function promptTokens(n, run) {
    return Array.from({length: n}, (_, i) => (i * 7919 + run) % (nVocab - 300) + 300);
}

async function promptSpeed(run) {
    await sequence.clearHistory();
    const start = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(promptTokens(nPrompt, run));
    return nPrompt / (performance.now() - start) * 1e3;
}

async function decodeSpeed(run) {
    await sequence.clearHistory();
    const start = performance.now();
    let decoded = 0;
    for await (const _ of sequence.evaluate(promptTokens(1, run), {temperature: 0, yieldEogToken: true}))
        if (++decoded >= nDecode) break;
    return nDecode / (performance.now() - start) * 1e3;
}

const result = {isa: llama.systemInfo};
for (const run of [0, 1]) { // the first one warms up
    if (nPrompt > 0) result.prompt = await promptSpeed(run);
    if (nDecode > 0) result.decode = await decodeSpeed(run);
}
console.log(JSON.stringify(result));
