"""Model files in EleutherAI's lm-evaluation-harness: the model `powerinfer` of lm_eval."""
