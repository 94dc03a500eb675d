"""blockdraft trains DFlash drafters online: target and drafter side by side in one process, one thread per GPU."""
