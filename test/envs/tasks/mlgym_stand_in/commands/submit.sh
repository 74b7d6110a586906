submit() { echo "<<SUBMISSION||number||SUBMISSION>>"; }
