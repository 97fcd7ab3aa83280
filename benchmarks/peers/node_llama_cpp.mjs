// The node-llama-cpp side of compare_llamacpp.py: node node_llama_cpp.mjs MODEL THREADS PROMPT DECODE
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const modelPath = process.argv[2];
const [threads, nPrompt, nDecode] = process.argv.slice(3).map(Number);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads});
const model = await llama.loadModel({modelPath});
const contextSize = nPrompt + nDecode + 64;
const context = await model.createContext({contextSize, threads, batchSize: 512, sequences: 1});
const sequence = context.getSequence();

async function measure(run) {
    await sequence.clearHistory();
    const prompt = Array.from({length: nPrompt}, (_, i) => (i * 7919 + run) % 40000 + 100);
    const start = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(prompt);
    const prompted = performance.now();
    let decoded = 0;
    for await (const _ of sequence.evaluate([500], {temperature: 0, yieldEogToken: true}))
        if (++decoded >= nDecode) break;
    const end = performance.now();
    return {prompt: nPrompt / (prompted - start) * 1e3, decode: nDecode / (end - prompted) * 1e3};
}

await measure(0);
console.log(JSON.stringify(await measure(1)));
