#!/bin/sh
echo "<<VALIDATION||number||VALIDATION>>"
